"""What travels: messages, and the frame that carries them; bytes only, no sockets."""
