"""A run is a directory: `write` appends to it, `read` reads it, and the other modules display it."""
