"""Layer freezing: by schedule, by the change of gradient norms (AutoFreeze), or by plasticity (Egeria)."""
