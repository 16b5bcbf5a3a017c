"""Steps whose memory others measured on real GPUs, built anew from what they published."""
