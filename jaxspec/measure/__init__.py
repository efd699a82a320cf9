"""Measuring: benchmark, prompts, roofline and reports; reads results and never sits inside a round."""
