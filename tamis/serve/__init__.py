"""An OpenAI-compatible server for a trained model: `tamis serve RUN`."""
