"""Connects other projects to memstate's public calls: a folder for each project, imported only where it is used."""
