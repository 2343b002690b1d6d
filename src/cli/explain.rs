//! `tidegate explain`: which rule answers for a descriptor, and why.

use std::process::ExitCode;

use anyhow::Context;
use clap::{Arg, ArgMatches, Command};

use super::{FAILED, descriptor, files, paths};
use crate::app;
use crate::model::Descriptor;
use crate::rules;
use crate::settings::Settings;
use crate::source::file::Source;

pub(super) fn command() -> Command {
    Command::new("explain")
        .about("Say which rule answers for a descriptor, which counter it charges, and why the others do not")
        .arg(Arg::new("domain").long("domain").required(true).help("The domain that the caller sends"))
        .arg(descriptor::argument())
        .arg(files().num_args(1..).required(true))
}

pub(super) fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let settings = Settings::read(app::environment)?;
    let files = match Source::Paths(paths(matches)).read() {
        Ok(files) => files,
        Err(wrong) => {
            wrong.iter().for_each(|wrong| eprintln!("{wrong}"));
            return Ok(ExitCode::from(FAILED));
        }
    };
    let loaded = rules::load(&files, app::options(&settings))?;
    let domain = matches.get_one::<String>("domain").context("no domain")?;
    let descriptor = matches.get_one::<Descriptor>("descriptor").context("no descriptor")?;
    print!("{}", rules::explain(&loaded.rules, domain, descriptor));
    Ok(ExitCode::SUCCESS)
}
