"""What all bindings share."""
