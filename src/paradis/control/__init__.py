"""The control plane: messages over long-lived gRPC streams."""
