"""verl 0.9 trains the adapter on the frozen NVFP4 model: engine and noise. Nothing else imports this room."""
