"""The first hour on a GPU: four stages of checks and measurements, one JSON record and one page."""
