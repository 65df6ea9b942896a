"""From storage into host memory while a request waits, agreed on between ranks."""
