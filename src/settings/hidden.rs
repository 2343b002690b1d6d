//! Values as errors show them: without what may be a secret.

/// Text shown in place of a secret.
pub(super) const HIDDEN: &str = "***";

/// Returns an invalid URL without the parts that may be a password: everything before the last `@`, everything if there are
/// parameters or a fragment, and in a URL without `@` the text at the place of the port.
pub(super) fn shown_url(url: &str) -> String {
    let (scheme, rest) = url.find("://").map_or(("", url), |at| url.split_at(at + "://".len()));
    if rest.contains(['?', '#']) {
        return format!("{scheme}{HIDDEN}");
    }
    if let Some((_, host)) = rest.rsplit_once('@') {
        return format!("{scheme}{HIDDEN}@{host}");
    }
    let is_port = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/');
    // The colon after an address in brackets, else the first colon.
    let colon = if rest.starts_with('[') { rest.find("]:").map(|at| at + 1) } else { rest.find(':') };
    match colon.map(|at| rest.split_at(at)) {
        Some((host, port)) if !scheme.is_empty() && !is_port(port.trim_start_matches(':')) => {
            format!("{scheme}{host}:{HIDDEN}")
        }
        _ => url.to_owned(),
    }
}
