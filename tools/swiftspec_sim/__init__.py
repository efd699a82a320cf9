"""Replays recorded texts of a pair of models through SwiftSpec's scheduler, under given step times."""
