"""The parameters that are communicated together, a registry of them, and changes that users make to them."""
