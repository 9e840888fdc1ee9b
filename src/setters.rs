//! Setters of configurations, which are not built outside of this crate by their fields: so that fields can be added.

/// Gives a configuration one setter for each field: it takes the configuration, and returns it changed.
macro_rules! setters {
    ($config:ident { $($field:ident: $type:ty),+ $(,)? }) => {
        impl $config {
            $(
                #[doc = concat!("The same, with [`", stringify!($config), "::", stringify!($field), "`](#structfield.", stringify!($field), ").")]
                #[must_use]
                pub const fn $field(mut self, $field: $type) -> $config {
                    self.$field = $field;
                    self
                }
            )+
        }
    };
}
