"""Control plane: gRPC streams that carry the messages of `paradis.wire.messages` as msgpack."""

import os

# gRPC reads this when it is first imported, hence here, before any module of the package. Its fork
# handlers wait for calls to pause, and our one stream lasts as long as the job: every fork of a
# data loader would stall. A forked child never talks to the leader; `fork.py` closes its sockets.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
