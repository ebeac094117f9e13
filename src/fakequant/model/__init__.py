"""Whole models: configure, prepare, calibrate, analyse, fine-tune, save."""
