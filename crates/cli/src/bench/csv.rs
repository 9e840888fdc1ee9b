//! Rows as comma-separated values (RFC 4180): the names of the columns, then a line for each row.

use serde_json::Value;

/// The line of names.
pub fn names(columns: &[(&str, Value)]) -> String {
    line(columns.iter().map(|(name, _)| (*name).to_owned()))
}

/// The line of values. A value that is absent is empty.
pub fn values(columns: &[(&str, Value)]) -> String {
    line(columns.iter().map(|(_, value)| match value {
        Value::Null => String::new(),
        Value::String(text) => field(text),
        other => other.to_string(),
    }))
}

fn line(fields: impl Iterator<Item = String>) -> String {
    fields.collect::<Vec<_>>().join(",")
}

/// Text in quotes if it holds what parts fields or lines.
fn field(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_quoted_where_they_must_be() {
        let columns = [
            ("plain", "a b".into()),
            ("comma", "a, \"b\"".into()),
            ("none", Value::Null),
            ("number", 1.5.into()),
            ("flag", true.into()),
        ];
        assert_eq!(names(&columns), "plain,comma,none,number,flag");
        assert_eq!(values(&columns), "a b,\"a, \"\"b\"\"\",,1.5,true");
    }
}
