//! `tidegate explain`: prints the rule that answers for a descriptor, or for those of an HTTP request, and the reason.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgMatches, Command};

use super::{admin, descriptor, with_rules};
use crate::model::Descriptor;
use crate::rulefile::CompiledRules;
use crate::rules;

mod envoy;
mod http;

pub(super) fn command() -> Command {
    let command = Command::new("explain")
        .about(
            "Show which rule answers for a descriptor or an HTTP request, which counter it charges, and why the other rules do not apply",
        )
        .after_help(
            "Examples:\n  A descriptor:\n    tidegate explain --domain edge --descriptor user=alice rules.yaml\n  A request about which NGINX asks at /check/edge, from the client 192.0.2.7:\n    tidegate explain --domain edge --gateway nginx --path /login --method POST --header 'X-Forwarded-For: 192.0.2.7' rules.yaml\n  A request that Envoy makes descriptors of, with the actions in its configuration:\n    tidegate explain --envoy envoy.yaml --path /login --header 'x-user-id: alice' --peer 192.0.2.7 rules.yaml",
        )
        .arg(Arg::new("domain").long("domain").required_unless_present(envoy::FILE).help("Domain of the request. With --envoy, the default is that of Envoy's filter, or the only one of the rules"))
        .arg(descriptor::argument().required(false).required_unless_present(http::PATH))
        .args(http::arguments())
        .args(envoy::arguments());
    with_rules(command)
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let CompiledRules { rules, warnings } = super::load(matches)?.1?;
    warnings.iter().for_each(|warning| eprintln!("{warning}"));
    let domain = matches.get_one::<String>("domain");
    let is_matched = match (matches.get_one::<PathBuf>(envoy::FILE), matches.get_one::<Descriptor>("descriptor")) {
        (Some(file), _) => envoy::explain(matches, &rules, file)?,
        (None, Some(descriptor)) => {
            let explanation = rules::explain(&rules, domain.context("no domain")?, descriptor);
            super::print(&explanation)?;
            explanation.is_matched()
        }
        (None, None) => http::explain(matches, &rules, domain.context("no domain")?)?,
    };
    if !is_matched {
        eprintln!("{}", admin::SEE_UNMATCHED);
    }
    Ok(ExitCode::SUCCESS)
}
