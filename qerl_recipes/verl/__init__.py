"""Train the adapter on the frozen NVFP4 model with verl 0.9: its engine and its noise. No other room imports this."""
