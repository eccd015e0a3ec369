"""The socket transports: ``tcp://`` between hosts, ``unix://`` within one.

Both are the same code over stream sockets; see `socket_connection` for what a link does and
`handshake` for who is let in.
"""

from __future__ import annotations

from paradis.errors import ConfigError, JoinRefused, PeerUnreachable, RemoteProtocolError
from paradis.transport.addresses import SCHEMES, connect_socket, listen_socket
from paradis.transport.base import Accept, Connection, Identity, LinkConfig, Listener, Sink
from paradis.transport.handshake import greet_peer
from paradis.transport.socket_connection import SocketConnection
from paradis.transport.socket_listener import SocketListener


class SocketTransport:
    """A `Transport` over stream sockets.

    Attributes:
        scheme: ``tcp`` or ``unix``.
    """

    def __init__(self, scheme: str, config: LinkConfig | None = None) -> None:
        """Choose the scheme.

        Args:
            scheme: ``tcp`` or ``unix``.
            config: settings of every link; the defaults when left out.

        Raises:
            ConfigError: another scheme.
        """
        if scheme not in SCHEMES:
            raise ConfigError(
                f"no socket transport for {scheme!r}: expected one of {SCHEMES}; correct the scheme"
            )
        self.scheme = scheme
        self._config = config or LinkConfig()

    def listen(self, address: str, identity: Identity, accept: Accept) -> Listener:
        """Listen on an address; see `addresses` for the forms.

        Args:
            address: where; ``tcp://host:0`` and ``unix://`` let the system choose.
            identity: who we are.
            accept: called with each authenticated connection, in its reading thread.

        Raises:
            ConfigError: the address is malformed or in use.
        """
        sock = listen_socket(address, self.scheme, self._config)
        return SocketListener(sock, identity=identity, accept=accept, config=self._config)

    def connect(self, address: str, identity: Identity, sink: Sink) -> Connection:
        """Connect, prove the token, and start delivering to ``sink``.

        Args:
            address: what the peer's listener shows.
            identity: who we are.
            sink: called from the connection's reading thread, perhaps before this returns.

        Raises:
            ConfigError: the address is malformed.
            PeerUnreachable: nothing answers within the deadline.
            JoinRefused: one of the two ends does not know the job's token.
            RemoteProtocolError: what answers is no Paradis node of this version.
        """
        sock = connect_socket(address, self.scheme, self._config)
        try:
            peer = greet_peer(sock, identity, self._config.connect_timeout_s)
        except (JoinRefused, RemoteProtocolError) as error:
            sock.close()
            raise type(error)(f"connecting to {address} failed: {error.message}") from error
        except OSError as error:
            sock.close()
            raise PeerUnreachable(
                f"no handshake with {address} within {self._config.connect_timeout_s} s: {error}; "
                "check that the peer runs and that the address is its data address"
            ) from error
        link = SocketConnection(sock, peer=peer, address=address, config=self._config)
        link.start(sink)
        return link
