"""What came of runs, from their records alone: tables, figures, one HTML page."""
