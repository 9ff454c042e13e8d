"""How a trained model is used."""
