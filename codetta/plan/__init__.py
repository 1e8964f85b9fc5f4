"""Plans: hardware facts, legal tiles, and which of them to use."""
