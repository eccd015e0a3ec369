"""The data plane: framed messages over memory, Unix sockets and TCP."""
