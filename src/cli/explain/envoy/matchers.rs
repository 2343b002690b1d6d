//! Envoy's matchers, applied to one request. What needs a running Envoy is not known.

use regex::Regex;

use super::fields::{Fields, Known};
use crate::cli::explain::http::HttpRequest;
use crate::rulefile::yaml::Node;

/// Headers that Envoy itself writes, so a request without them can have them at the filter.
const OF_ENVOY: [&str; 3] = ["x-forwarded-for", "x-forwarded-proto", "x-request-id"];
/// Beginning of the names of other headers that Envoy writes.
const OF_ENVOY_PREFIX: &str = "x-envoy-";
/// Conditions of a route that are evaluated here.
const OF_ROUTE: [&str; 7] =
    ["prefix", "path", "path_separated_prefix", "safe_regex", "case_sensitive", "headers", "query_parameters"];

/// Returns the values of a header, pseudo-headers included, in their order.
///
/// # Errors
/// If the request does not say it.
pub(super) fn header<'r>(request: &'r HttpRequest, name: &str) -> Known<Vec<&'r str>> {
    let name = name.to_ascii_lowercase();
    let own = match name.as_str() {
        ":path" => return Ok(vec![&request.path]),
        ":method" => return Ok(vec![request.method.as_str()]),
        ":authority" => "host",
        other => other,
    };
    let values = request.headers.get_all(own).iter();
    let values: Vec<&str> = values.filter_map(|value| std::str::from_utf8(value.as_bytes()).ok()).collect();
    let is_given_elsewhere = own == "host" || own.starts_with(':');
    if values.is_empty() && (is_given_elsewhere || OF_ENVOY.contains(&own) || own.starts_with(OF_ENVOY_PREFIX)) {
        return Err(if own.starts_with(':') {
            format!("{own} is not known here")
        } else {
            format!("every request has {own}, or Envoy may add it: give it with --header '{own}: VALUE'")
        });
    }
    Ok(values)
}

/// Returns the first value of a query parameter; `None` if the request has none.
///
/// # Errors
/// If the query has escapes, which are compared after decoding.
pub(super) fn query<'r>(request: &'r HttpRequest, name: &str) -> Known<Option<&'r str>> {
    let query = request.path.split_once('?').map_or("", |(_, query)| query);
    let query = query.split_once('#').map_or(query, |(query, _)| query);
    if query.contains('%') {
        return Err("the query has `%`, which is not decoded here: give it without".to_owned());
    }
    let pairs = query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    Ok(pairs.filter(|(key, _)| *key == name).map(|(_, value)| value).next())
}

/// Returns true if all of these are true. One that is false decides, whatever is not known of the others.
pub(super) fn all(results: impl Iterator<Item = Known<bool>>) -> Known<bool> {
    let mut unknown = None;
    for result in results {
        match result {
            Ok(false) => return Ok(false),
            Ok(true) => {}
            Err(reason) => unknown = unknown.or(Some(reason)),
        }
    }
    unknown.map_or(Ok(true), Err)
}

/// Returns true if the request matches a `HeaderMatcher`.
pub(super) fn is_header(request: &HttpRequest, matcher: Node<'_>) -> Known<bool> {
    let name = matcher.text_of("name").unwrap_or_default();
    let values = header(request, name)?;
    let inverts = matcher.flag_of("invert_match").unwrap_or(false);
    let value = match values.as_slice() {
        [] if matcher.flag_of("treat_missing_header_as_empty") == Some(true) => Some(""),
        [] => None,
        [value] => Some(*value),
        _ => return Err(format!("the request has the header {name} more than once, which is not compared here")),
    };
    let conditions = [
        "exact_match",
        "prefix_match",
        "suffix_match",
        "contains_match",
        "safe_regex_match",
        "string_match",
        "range_match",
    ];
    let condition = conditions.into_iter().find_map(|name| Some((name, matcher.field(name)?)));
    let is_match = match (condition, value) {
        (None, value) => value.is_some() == matcher.flag_of("present_match").unwrap_or(true),
        // Also with `invert_match`: tests/it/envoy/explained.rs.
        (Some(_), None) => return Ok(false),
        (Some((name, node)), Some(value)) => {
            let text = node.text().unwrap_or_default();
            match name {
                "exact_match" => value == text,
                "prefix_match" => value.starts_with(text),
                "suffix_match" => value.ends_with(text),
                "contains_match" => value.contains(text),
                "safe_regex_match" => is_regex(value, node)?,
                "range_match" => {
                    let (start, end) = (node.number_of("start").unwrap_or(0), node.number_of("end").unwrap_or(0));
                    value.parse::<i64>().is_ok_and(|value| (start..end).contains(&value))
                }
                _ => is_string(value, node)?,
            }
        }
    };
    Ok(is_match != inverts)
}

/// Returns true if the request matches a `QueryParameterMatcher`.
pub(super) fn is_query(request: &HttpRequest, matcher: Node<'_>) -> Known<bool> {
    let value = query(request, matcher.text_of("name").unwrap_or_default())?;
    match (matcher.field("string_match"), value) {
        (None, value) => Ok(value.is_some() == matcher.flag_of("present_match").unwrap_or(true)),
        (Some(_), None) => Ok(false),
        (Some(matcher), Some(value)) => is_string(value, matcher),
    }
}

/// Returns true if the request matches a `RouteMatch`.
pub(super) fn is_route(request: &HttpRequest, matcher: Node<'_>) -> Known<bool> {
    let path = request.path.split(['?', '#']).next().unwrap_or_default();
    let folds = matcher.flag_of("case_sensitive") == Some(false);
    let fold = |text: &str| if folds { text.to_ascii_lowercase() } else { text.to_owned() };
    let (path, written) = (fold(path), |name| matcher.text_of(name).map(fold));
    let is_path =
        match (written("prefix"), written("path"), written("path_separated_prefix"), matcher.field("safe_regex")) {
            (Some(prefix), ..) => Ok(path.starts_with(&prefix)),
            (_, Some(exact), ..) => Ok(path == exact),
            (_, _, Some(prefix), _) => {
                Ok(path.strip_prefix(&prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/')))
            }
            (.., Some(regex)) => is_regex(&path, regex),
            _ => Err("its match is not evaluated here".to_owned()),
        };
    let each = |name: &str| matcher.field(name).into_iter().flat_map(Fields::items);
    let headers = each("headers").map(|header| is_header(request, header));
    let queries = each("query_parameters").map(|query| is_query(request, query));
    let others = matcher
        .fields()
        .filter(|(key, _)| !OF_ROUTE.iter().any(|name| super::fields::is_name(key, name)))
        .map(|(key, _)| Err(format!("`{key}` of its match is not evaluated here")));
    all(std::iter::once(is_path).chain(headers).chain(queries).chain(others))
}

/// Returns true if `value` matches a `StringMatcher`.
fn is_string(value: &str, matcher: Node<'_>) -> Known<bool> {
    let folds = matcher.flag_of("ignore_case").unwrap_or(false);
    let fold = |text: &str| if folds { text.to_ascii_lowercase() } else { text.to_owned() };
    let (folded, written) = (fold(value), |name| matcher.text_of(name).map(fold));
    if let Some(regex) = matcher.field("safe_regex") {
        return is_regex(value, regex);
    }
    match (written("exact"), written("prefix"), written("suffix"), written("contains")) {
        (Some(text), ..) => Ok(folded == text),
        (_, Some(text), ..) => Ok(folded.starts_with(&text)),
        (_, _, Some(text), _) => Ok(folded.ends_with(&text)),
        (.., Some(text)) => Ok(folded.contains(&text)),
        _ => Err("its `string_match` is not evaluated here".to_owned()),
    }
}

/// Returns true if all of `value` matches a `RegexMatcher`.
fn is_regex(value: &str, matcher: Node<'_>) -> Known<bool> {
    let text = matcher.text_of("regex").unwrap_or_default();
    let whole = Regex::new(&format!("^(?:{text})$"));
    Ok(whole.map_err(|_| format!("the regular expression `{text}` is not evaluated here"))?.is_match(value))
}
