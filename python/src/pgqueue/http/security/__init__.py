"""Who a caller is, what the caller may do, and what is recorded of it."""
