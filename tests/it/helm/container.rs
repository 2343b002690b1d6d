use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use tempfile::TempDir;
use tokio::process::Command;

use super::aside;
use crate::support::{Process, output};

/// The user of the image and of the chart.
pub const USER: u32 = 65532;

/// Makes the image the root, read-only, with read-only volumes in it, and becomes its user without any right.
const ENTER: &str = r#"
PATH=/usr/sbin:/usr/bin:/sbin:/bin
root=$1; shift
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
    mount --bind "$1" "$root$2"
    mount -o remount,bind,ro "$root$2"
    shift 2
done
shift
mount --rbind /proc "$root/proc"
mount -o remount,bind,ro "$root"
exec chroot "$root" /.test/setpriv --reuid 65532 --regid 65532 --clear-groups --bounding-set -all --inh-caps -all \
    --no-new-privs -- "$@"
"#;

/// The image's files and a network of its own, in which ports and names are those of the chart.
pub struct Host {
    /// It holds the network; the first to go.
    network: Process,
    root: TempDir,
}

impl Host {
    /// What the Dockerfile makes, on a network where these names are known. Without the rights to confine a process there
    /// is none, and the test says so and passes.
    pub async fn new(names: &[String], volumes: &[&str]) -> Option<Self> {
        let (status, _, errors) =
            output(Command::new("unshare").args(["--mount", "--net", "sh", "-c", "mount --bind /proc /proc"])).await;
        if !rustix::process::geteuid().is_root() || !status.success() {
            aside(&format!(
                "SKIPPED: only root, where `unshare` is permitted, can run what the chart deploys: {errors}"
            ));
            return None;
        }
        let root = tempfile::tempdir().expect("a directory");
        image(root.path()).await;
        let hosts: String = names.iter().map(|name| format!("127.0.0.1 {name}\n")).collect();
        write(&root.path().join("etc/hosts"), &hosts);
        write(&root.path().join("etc/nsswitch.conf"), "hosts: files dns\n");
        for volume in volumes {
            directory(&root.path().join(volume.trim_start_matches('/')));
        }
        let mut network = Command::new("unshare");
        network.args(["--net", "sh", "-c", "ip link set lo up && echo up && exec sleep infinity"]);
        let mut network = Process::start(&mut network);
        assert_eq!(network.line().await.as_deref(), Some("up"), "{}", network.errors());
        Some(Self { network, root })
    }

    /// A program of this machine, on the network.
    pub fn beside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("/usr/bin/nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.network.pid())).arg(program);
        command
    }

    /// A container of the image: this command with this environment and nothing else, and these volumes.
    pub fn container(
        &self,
        volumes: &[(PathBuf, &str)],
        environment: &[(String, String)],
        command: &[&str],
    ) -> Process {
        let mut inside = self.beside("unshare");
        inside.args(["--mount", "sh", "-euc", ENTER, "sh"]).arg(self.root.path());
        for (directory, at) in volumes {
            inside.arg(directory).arg(at);
        }
        inside.arg("--").args(command).env_clear();
        Process::start(inside.envs(environment.iter().map(|(name, value)| (name, value))))
    }

    /// The same to its end, and what it said.
    pub async fn run(&self, environment: &[(String, String)], command: &[&str]) -> (ExitStatus, String) {
        let mut process = self.container(&[], environment, command);
        let mut said = String::new();
        while let Some(line) = process.line().await {
            said.extend([&line, "\n"]);
        }
        let status = process.ended().await;
        (status, said + &process.errors())
    }
}

/// What the Dockerfile makes, put together by its own command, and beside it what the kubelet or the test needs.
async fn image(root: &Path) {
    let below = root.to_str().expect("a path in UTF-8");
    let command = super::image::put_together(env!("CARGO_BIN_EXE_tidegate"), below);
    let (status, _, errors) = output(Command::new("sh").args(["-c", &command])).await;
    assert!(status.success(), "{command}: {errors}");
    for name in ["etc", "proc", ".test"] {
        directory(&root.join(name));
    }
    // A temporary directory is closed to others.
    directory(root);
    // No part of the image: what drops the rights.
    let setpriv = Path::new("/usr/bin/setpriv");
    copy(setpriv, &root.join(".test/setpriv"));
    for library in libraries(setpriv).await {
        copy(&library, &root.join(library.strip_prefix("/").expect("an absolute path")));
    }
}

/// The libraries that a program is started with.
async fn libraries(program: &Path) -> Vec<PathBuf> {
    let (status, said, errors) = output(Command::new("ldd").arg(program)).await;
    assert!(status.success(), "{errors}");
    let paths = said.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    paths.map(PathBuf::from).collect()
}

/// A ConfigMap or a Secret as the kubelet mounts it: files are links through `..data`, and a change turns that one link.
pub struct Mounted {
    pub directory: TempDir,
    turns: u32,
    mode: u32,
}

impl Mounted {
    /// These files, by name, for everyone to read.
    pub fn new(files: &[(String, String)]) -> Self {
        Self::with(files, 0o644)
    }

    /// These files, by name, for the `fsGroup` of the pod alone, as the chart asks for secrets.
    pub fn secret(files: &[(String, String)]) -> Self {
        Self::with(files, 0o440)
    }

    fn with(files: &[(String, String)], mode: u32) -> Self {
        let mounted = tempfile::tempdir().expect("a directory");
        directory(mounted.path());
        let mut mounted = Self { directory: mounted, turns: 0, mode };
        mounted.turn(files);
        for (name, _) in files {
            symlink(Path::new("..data").join(name), mounted.directory.path().join(name)).expect("a link");
        }
        mounted
    }

    /// The same files with other contents.
    pub fn turn(&mut self, files: &[(String, String)]) {
        self.turns += 1;
        let name = format!("..2026_{}", self.turns);
        let at = self.directory.path();
        directory(&at.join(&name));
        for (file, text) in files {
            let path = at.join(&name).join(file);
            write(&path, text);
            chown(&path, None, Some(USER)).expect("it is given to the group");
            fs::set_permissions(&path, fs::Permissions::from_mode(self.mode)).expect("it is guarded");
        }
        symlink(&name, at.join("..data_tmp")).expect("a link");
        fs::rename(at.join("..data_tmp"), at.join("..data")).expect("it is renamed");
    }
}

fn directory(path: &Path) {
    fs::create_dir_all(path).expect("a directory");
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("it is opened");
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).expect("it is written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).expect("it is readable");
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
    fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
}
