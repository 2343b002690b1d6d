//! What Tidegate promises, tried from outside.

mod path;
mod world;
