"""Problems and rewards."""
