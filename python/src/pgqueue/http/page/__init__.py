"""The page that shows and operates queues."""
