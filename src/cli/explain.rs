//! `tidegate explain`: prints the rule that answers for a descriptor, and the reason.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgMatches, Command};

use super::{admin, descriptor, with_rules};
use crate::model::Descriptor;
use crate::rulefile::CompiledRules;
use crate::rules;

pub(super) fn command() -> Command {
    let command = Command::new("explain")
        .about(
            "Show which rule answers for a descriptor, which counter it charges, and why the other rules do not apply",
        )
        .arg(Arg::new("domain").long("domain").required(true).help("Domain of the request"))
        .arg(descriptor::argument());
    with_rules(command, &["overlay", "push"])
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let CompiledRules { rules, warnings } = super::load(matches)?.1?;
    warnings.iter().for_each(|warning| eprintln!("{warning}"));
    let domain = matches.get_one::<String>("domain").context("no domain")?;
    let descriptor = matches.get_one::<Descriptor>("descriptor").context("no descriptor")?;
    let explanation = rules::explain(&rules, domain, descriptor);
    super::print(&explanation)?;
    if !explanation.is_matched() {
        eprintln!("{}", admin::SEE_UNMATCHED);
    }
    Ok(ExitCode::SUCCESS)
}
