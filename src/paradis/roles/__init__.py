"""Pure switchboards: an event in, effects out; they ask core and hold no rule themselves."""
