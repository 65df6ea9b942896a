"""Makes traces: synthetic ones, and ones from logs of servers, without the texts of the logs."""
