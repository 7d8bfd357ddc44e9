"""What a step's time, its waiting and its gradients are, measured without synchronising the device."""
