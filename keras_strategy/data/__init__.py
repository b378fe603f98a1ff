"""From the user's data to each replica's rows."""
