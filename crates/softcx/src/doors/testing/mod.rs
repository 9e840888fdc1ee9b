//! What only fuzz targets have.

pub mod hostile;
