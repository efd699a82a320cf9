"""Device meshes: plans, axis rules, padding."""
