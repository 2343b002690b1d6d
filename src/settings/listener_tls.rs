//! Settings of TLS on the listeners.

use std::sync::Arc;

use super::values::Setting;
use super::{InvalidSetting, Lookup, SettingRow, SettingRows, UnusedVariable, rows};
use crate::file::{MAX_CERTIFICATES, MAX_SECRET, Named};
use crate::model::PeerName;

/// Rows of the settings of TLS on the gRPC listener.
pub(super) const TABLE: &[SettingRow] = ROWS.table;

/// Maximum number of names in `GRPC_CLIENT_TLS_SAN`: 1,000.
const MOST_NAMES: usize = 1_000;

const CERTIFICATE: &str = "GRPC_SERVER_TLS_CERT";
const KEY: &str = "GRPC_SERVER_TLS_KEY";
const AUTHORITIES: &str = "GRPC_CLIENT_TLS_CACERT";
const MORE_AUTHORITIES: &str = "GRPC_SERVER_TLS_CA_CERT";
const NAMES: &str = "GRPC_CLIENT_TLS_SAN";
const HTTP: &str = "HTTP_SERVER_USE_TLS";
const DEBUG: &str = "DEBUG_SERVER_USE_TLS";
const CLIENT_AUTH: &str = "GRPC_CLIENT_AUTH";

/// Settings of TLS on the gRPC listener, and on the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerTlsSettings {
    /// File with the certificate, and with those of intermediate authorities.
    pub certificate: Named,
    /// File with its key.
    pub key: Named,
    /// True if TLS 1.2 is refused.
    pub is_tls13: bool,
    /// Files with the authorities of clients. Without one, clients need no certificate.
    pub authorities: Vec<Named>,
    /// Names of which a client needs one; empty: any name.
    pub names: Arc<[PeerName]>,
    /// True if the HTTP listener serves TLS too.
    pub is_http_too: bool,
    /// True if the debug listener serves TLS too.
    pub is_debug_too: bool,
}

/// Settings of TLS on the gRPC listener, not yet combined.
struct Variables {
    is_on: bool,
    certificate: String,
    key: String,
    lowest: LowestVersion,
    authorities: String,
    names: Names,
    client_auth: ClientAuth,
    more_authorities: String,
    is_http_too: bool,
    is_debug_too: bool,
}

const ROWS: SettingRows<Variables> = rows!(Variables {
    is_on: bool = "GRPC_SERVER_USE_TLS", "false", "Serves gRPC over TLS instead of plaintext";
    certificate: String = CERTIFICATE, "", "PEM file with the certificate of the gRPC listener, and after it those of intermediate CAs; read again when it changes";
    key: String = KEY, "", "PEM file with the private key of GRPC_SERVER_TLS_CERT: PKCS#8, PKCS#1 or SEC1; read again when it changes";
    lowest: LowestVersion = "GRPC_SERVER_TLS_MIN_VERSION", "1.2", "Lowest version of TLS that the gRPC listener accepts";
    authorities: String = AUTHORITIES, "", "PEM file with the CA certificates of clients; if it is set, a client needs a certificate of one of them; read again when it changes";
    names: Names = NAMES, "", "Names of which a client certificate needs one, separated by commas: DNS names (*.edge: one label before .edge), IP addresses and URIs such as spiffe://cluster.local/ns/edge/sa/envoy; empty: any name";
    client_auth: ClientAuth = CLIENT_AUTH, "", "require: a client needs a certificate of a CA in GRPC_CLIENT_TLS_CACERT or GRPC_SERVER_TLS_CA_CERT; empty: it needs one only if GRPC_CLIENT_TLS_CACERT is set";
    more_authorities: String = MORE_AUTHORITIES, "", "PEM file with CA certificates of clients, as Envoy Gateway sets it; used only with GRPC_CLIENT_AUTH=require; read again when it changes";
    is_http_too: bool = HTTP, "false", "Serves the HTTP listener over TLS too, with the certificate of GRPC_SERVER_TLS_CERT and without client certificates";
    is_debug_too: bool = DEBUG, "false", "Serves the debug listener over TLS too, with the certificate of GRPC_SERVER_TLS_CERT and without client certificates";
});

/// Reads the settings of TLS on the gRPC listener; `Some(None)` for plaintext. Adds variables without effect to `unused`.
pub(super) fn read(
    given: Lookup<'_>,
    wrong: &mut Vec<InvalidSetting>,
    unused: &mut Vec<UnusedVariable>,
) -> Option<Option<ListenerTlsSettings>> {
    let read = (ROWS.read)(given, wrong)?;
    let files = [
        (CERTIFICATE, &read.certificate),
        (KEY, &read.key),
        (AUTHORITIES, &read.authorities),
        (MORE_AUTHORITIES, &read.more_authorities),
    ];
    let has_no_name = read.names.0.is_empty();
    if !read.is_on {
        if read.client_auth.is_required {
            let takes =
                "an empty value, because GRPC_SERVER_USE_TLS is false and clients in plaintext have no certificate";
            wrong.push(InvalidSetting::Value { variable: CLIENT_AUTH, found: "require".to_owned(), takes });
        }
        for (variable, is_on) in [(HTTP, read.is_http_too), (DEBUG, read.is_debug_too)] {
            if is_on {
                let takes = "false, because GRPC_SERVER_USE_TLS is false, and all listeners have its certificate";
                wrong.push(InvalidSetting::Value { variable, found: "true".to_owned(), takes });
            }
        }
        let given = files.iter().filter(|(_, path)| !path.is_empty()).map(|(variable, _)| *variable);
        let given = given.chain((!has_no_name).then_some(NAMES));
        let why = "it applies only with GRPC_SERVER_USE_TLS=true";
        unused.extend(given.map(|variable| UnusedVariable { variable, why }));
        return Some(None);
    }
    let named = |(variable, path): (&'static str, &String), most| Named::new(variable, path.into(), most);
    for (variable, takes) in [
        (CERTIFICATE, "a file with the certificate of the gRPC listener, because GRPC_SERVER_USE_TLS is true"),
        (KEY, "a file with the private key of GRPC_SERVER_TLS_CERT, because GRPC_SERVER_USE_TLS is true"),
    ] {
        if files.iter().any(|(name, path)| *name == variable && path.is_empty()) {
            wrong.push(InvalidSetting::Value { variable, found: String::new(), takes });
        }
    }
    let [certificate, key, authorities, more_authorities] = files;
    let used = [Some(authorities), read.client_auth.is_required.then_some(more_authorities)].into_iter().flatten();
    let used: Vec<_> = used.filter(|(_, path)| !path.is_empty()).collect();
    if used.is_empty() {
        if read.client_auth.is_required {
            let takes = "a file with the CA certificates of clients, because GRPC_CLIENT_AUTH is require (GRPC_SERVER_TLS_CA_CERT is empty too)";
            wrong.push(InvalidSetting::Value { variable: AUTHORITIES, found: String::new(), takes });
        }
        let why = "no CA of clients is set, so clients need no certificate; set GRPC_CLIENT_TLS_CACERT";
        unused.extend((!has_no_name).then_some(UnusedVariable { variable: NAMES, why }));
    }
    if !read.client_auth.is_required && !read.more_authorities.is_empty() {
        let why = "it applies only with GRPC_CLIENT_AUTH=require, as envoyproxy/ratelimit does not read it";
        unused.push(UnusedVariable { variable: MORE_AUTHORITIES, why });
    }
    Some(Some(ListenerTlsSettings {
        certificate: named(certificate, MAX_CERTIFICATES),
        key: named(key, MAX_SECRET),
        is_tls13: read.lowest.is_tls13,
        authorities: used.into_iter().map(|file| named(file, MAX_CERTIFICATES)).collect(),
        names: read.names.0.into(),
        is_http_too: read.is_http_too,
        is_debug_too: read.is_debug_too,
    }))
}

/// Lowest version of TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LowestVersion {
    is_tls13: bool,
}

impl Setting for LowestVersion {
    const TAKES: &'static str = "1.2 or 1.3";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "1.2" => Some(Self { is_tls13: false }),
            "1.3" => Some(Self { is_tls13: true }),
            _ => None,
        }
    }
}

/// Decides if a client needs a certificate even without `GRPC_CLIENT_TLS_CACERT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ClientAuth {
    is_required: bool,
}

impl Setting for ClientAuth {
    const TAKES: &'static str = "require, or empty";
    fn parse(text: &str) -> Option<Self> {
        match text {
            "" => Some(Self { is_required: false }),
            "require" => Some(Self { is_required: true }),
            _ => None,
        }
    }
}

/// Names of clients.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Names(Vec<PeerName>);

impl Setting for Names {
    const TAKES: &'static str =
        "at most 1000 DNS names, IP addresses or URIs, separated by commas; * stands for one whole first label";
    fn parse(text: &str) -> Option<Self> {
        if text.is_empty() {
            return Some(Self(Vec::new()));
        }
        let names: Vec<_> = text.split(',').map(|name| PeerName::parse(name.trim())).collect::<Option<_>>()?;
        (names.len() <= MOST_NAMES).then_some(Self(names))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{read, wrong};
    use super::*;

    const ON: [(&str, &str); 3] =
        [("GRPC_SERVER_USE_TLS", "true"), (CERTIFICATE, "/certs/tls.crt"), (KEY, "/certs/tls.key")];

    fn with(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
        [&ON[..], more].concat()
    }

    fn tls(more: &[(&'static str, &'static str)]) -> ListenerTlsSettings {
        read(&with(more)).unwrap().listener_tls.unwrap()
    }

    fn unused(given: &[(&str, &str)]) -> Vec<&'static str> {
        read(given).unwrap().unused.into_iter().map(|unused| unused.variable).collect()
    }

    #[test]
    fn plaintext_is_the_default_and_the_files_of_tls_are_then_named_as_without_effect() {
        assert_eq!(read(&[]).unwrap().listener_tls, None);
        assert_eq!(unused(&ON[1..]), [CERTIFICATE, KEY]);
        assert_eq!(
            wrong(&[(CLIENT_AUTH, "require")]),
            [
                r#"GRPC_CLIENT_AUTH is "require": expected an empty value, because GRPC_SERVER_USE_TLS is false and clients in plaintext have no certificate"#
            ]
        );
    }

    #[test]
    fn tls_needs_a_certificate_and_a_key() {
        assert_eq!(
            wrong(&ON[..1]),
            [
                r#"GRPC_SERVER_TLS_CERT is "": expected a file with the certificate of the gRPC listener, because GRPC_SERVER_USE_TLS is true"#,
                r#"GRPC_SERVER_TLS_KEY is "": expected a file with the private key of GRPC_SERVER_TLS_CERT, because GRPC_SERVER_USE_TLS is true"#,
            ]
        );
        assert!(!tls(&[]).is_tls13);
        assert!(tls(&[("GRPC_SERVER_TLS_MIN_VERSION", "1.3")]).is_tls13);
        assert!(read(&with(&[("GRPC_SERVER_TLS_MIN_VERSION", "1.1")])).is_err());
    }

    #[test]
    fn the_authority_of_envoy_gateway_counts_only_where_a_certificate_is_required() {
        let gateway = (MORE_AUTHORITIES, "/certs/ca.crt");
        assert!(tls(&[gateway]).authorities.is_empty());
        assert_eq!(unused(&with(&[gateway])), [MORE_AUTHORITIES]);
        assert_eq!(tls(&[gateway, (CLIENT_AUTH, "require")]).authorities.len(), 1);
        assert_eq!(tls(&[gateway, (CLIENT_AUTH, "require"), (AUTHORITIES, "/ca")]).authorities.len(), 2);
        assert_eq!(tls(&[(AUTHORITIES, "/ca")]).authorities.len(), 1);
        assert_eq!(
            wrong(&with(&[(CLIENT_AUTH, "require")])),
            [
                r#"GRPC_CLIENT_TLS_CACERT is "": expected a file with the CA certificates of clients, because GRPC_CLIENT_AUTH is require (GRPC_SERVER_TLS_CA_CERT is empty too)"#
            ]
        );
    }

    #[test]
    fn names_are_a_list_of_dns_names_addresses_and_uris() {
        let names = tls(&[(AUTHORITIES, "/ca"), (NAMES, "envoy.edge, *.edge,10.0.0.1,spiffe://a/b")]).names;
        assert_eq!(names.len(), 4);
        assert!(tls(&[]).names.is_empty());
        for text in ["envoy.*", ",", "a,,b", "en*.edge"] {
            assert!(read(&with(&[(AUTHORITIES, "/ca"), (NAMES, text)])).is_err(), "{text}");
        }
        assert_eq!(unused(&with(&[(NAMES, "envoy.edge")])), [NAMES]);
    }
}
