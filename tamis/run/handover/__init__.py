"""What a finished run gives away: report, curves, bundle, redaction."""
