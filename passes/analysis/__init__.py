"""What passes and forecasts ask of a program: costs, memory, a simulated step, axes."""
