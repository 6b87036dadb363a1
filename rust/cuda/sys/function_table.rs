//! A macro that declares the functions of a shared library as a struct of symbols.

/// Declares `$table` with one symbol per function, and `$table::load`. The argument types must be
/// those of the library's header: nothing checks them.
macro_rules! function_table {
    ($table:ident { $($field:ident = $name:literal ($($argument:ty),*) -> $result:ty;)* }) => {
        pub struct $table {
            $(pub $field: Symbol<unsafe extern "C" fn($($argument),*) -> $result>,)*
        }

        impl $table {
            pub fn load(library: &Library) -> std::result::Result<$table, libloading::Error> {
                // SAFETY: the types are those of the library's header.
                unsafe { Ok($table { $($field: library.get($name.as_bytes())?,)* }) }
            }
        }
    };
}
