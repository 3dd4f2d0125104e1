"""Messages to the operator: what happened in a run, sent to webhooks and chat services."""
