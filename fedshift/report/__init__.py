"""Reports on runs, made from their records alone: tables, figures, one HTML page."""
