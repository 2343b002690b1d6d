//! Settings of the HTTP listener's `/json`: who may use it, and with which rights.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::values::Setting;
use crate::model::Rights;

/// Callers that may use `/json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonAccess {
    /// All.
    On,
    /// Those on this machine.
    Loopback,
    /// None.
    Off,
}

impl JsonAccess {
    /// Returns true if a caller at `address` may use it.
    pub fn admits(self, address: IpAddr) -> bool {
        match self {
            Self::On => true,
            // Not all of 127.0.0.0/8: the sidecar of a mesh passes calls of other machines on from 127.0.0.6.
            Self::Loopback => {
                [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()].contains(&address.to_canonical())
            }
            Self::Off => false,
        }
    }
}

impl Setting for JsonAccess {
    const TAKES: &'static str = "on, loopback or off";
    /// Accepts `true` and `false` too: YAML reads `on` and `off` without quotes as these.
    fn parse(text: &str) -> Option<Self> {
        match text {
            "on" | "true" => Some(Self::On),
            "loopback" => Some(Self::Loopback),
            "off" | "false" => Some(Self::Off),
            _ => None,
        }
    }
}

/// Rights of callers over HTTP without a file of callers; `None`: those of the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JsonRights(Option<Rights>);

impl JsonRights {
    /// Returns the rights. The reference takes limits with requests, and `is_reference` says that rules are in its directory.
    pub fn rights(self, is_reference: bool) -> Rights {
        self.0.unwrap_or(Rights { may_override: is_reference, may_refund: false })
    }
}

impl Setting for JsonRights {
    const TAKES: &'static str = "auto, none, override, refund or override,refund";
    fn parse(text: &str) -> Option<Self> {
        let rights = |may_override, may_refund| Some(Self(Some(Rights { may_override, may_refund })));
        match text {
            "auto" => Some(Self(None)),
            "none" => rights(false, false),
            "override" => rights(true, false),
            "refund" => rights(false, true),
            "override,refund" | "refund,override" => rights(true, true),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_from_loopback_admits_callers_of_this_machine_only() {
        let admits = |access: &str, address: &str| JsonAccess::parse(access).unwrap().admits(address.parse().unwrap());
        for address in ["127.0.0.1", "::1", "::ffff:127.0.0.1"] {
            assert!(admits("loopback", address) && admits("on", address) && !admits("off", address), "{address}");
        }
        for address in ["10.0.0.1", "127.0.0.6", "0.0.0.0", "::ffff:10.0.0.1", "fe80::1"] {
            assert!(!admits("loopback", address) && admits("on", address) && !admits("off", address), "{address}");
        }
    }

    #[test]
    fn access_is_on_or_off_also_as_yaml_reads_these_words() {
        for (text, access) in
            [("on", JsonAccess::On), ("true", JsonAccess::On), ("off", JsonAccess::Off), ("false", JsonAccess::Off)]
        {
            assert_eq!(JsonAccess::parse(text), Some(access), "{text}");
        }
        for wrong in ["yes", "ON", "1", ""] {
            assert_eq!(JsonAccess::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn callers_over_http_give_nothing_back_unless_a_setting_says_so() {
        let rights = |text: &str, is_reference| JsonRights::parse(text).unwrap().rights(is_reference);
        let right = |may_override, may_refund| Rights { may_override, may_refund };
        assert_eq!([rights("auto", false), rights("auto", true)], [right(false, false), right(true, false)]);
        assert_eq!([rights("none", true), rights("override", false)], [right(false, false), right(true, false)]);
        assert_eq!([rights("refund", true), rights("override,refund", false)], [right(false, true), Rights::ALL]);
        for wrong in ["", "all", "Override", "override refund"] {
            assert_eq!(JsonRights::parse(wrong), None, "{wrong}");
        }
    }
}
