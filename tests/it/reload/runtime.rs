//! The reference's runtime directory, laid out and changed as its operators do it.

use super::*;

fn limit(text: &str) -> String {
    format!("domain: d\ndescriptors: [{{ key: one, rate_limit: {{ unit: year, requests_per_unit: {text} }} }}]\n")
}

#[tokio::test]
async fn a_runtime_root_that_is_a_link_may_be_turned_to_another_release() {
    let made = directory([
        ("releases/1/tide/config/a.yaml", &limit("1")),
        ("releases/2/tide/config/a.yaml", &limit("2")),
        ("releases/3/tide/config/other.yaml", &limit("3")),
    ]);
    symlink("releases/1", made.path().join("current")).expect("a link");
    let root = made.path().join("current");
    let variables = [
        ("RUNTIME_ROOT", root.to_str().expect("text")),
        ("RUNTIME_SUBDIRECTORY", "tide"),
        ("RUNTIME_WATCH_ROOT", "true"),
        ("LOG_LEVEL", "debug"),
    ];
    let server = Tidegate::start_with(None, &variables).await;
    let scene = Scene { directory: made, server };
    scene.looks_after(1).await;
    for (release, limit) in [(2, 2), (3, 3), (1, 1), (2, 2)] {
        let looks = scene.looks();
        symlink(format!("releases/{release}"), scene.at("next")).expect("a link");
        fs::rename(scene.at("next"), scene.at("current")).expect("the link is turned");
        scene.shows(&[("d.one", limit)]).await;
        // What is newly watched is looked at once more, which would find the next turn though nothing told of it.
        scene.looks_after(looks).await;
    }
    // What it led to before is nobody's any more, and what it leads to now is edited.
    scene.edit("releases/1/tide/config/a.yaml", &limit("10"));
    scene.edit("releases/2/tide/config/a.yaml", &limit("20"));
    scene.shows(&[("d.one", 20)]).await;
    assert_eq!(scene.load().await, 6);
}

#[tokio::test]
async fn a_config_map_in_the_app_directory_is_followed_with_the_root_watched_or_not() {
    for is_watched in ["false", "true"] {
        let made = tempfile::tempdir().expect("a directory");
        let volume = made.path().join("ratelimit/config");
        mount(&volume, "..2026_1", &limit("1"));
        let variables = [
            ("RUNTIME_ROOT", made.path().to_str().expect("text")),
            ("RUNTIME_SUBDIRECTORY", "ratelimit"),
            ("RUNTIME_WATCH_ROOT", is_watched),
            ("RUNTIME_IGNOREDOTFILES", "true"),
            ("LOG_LEVEL", "debug"),
        ];
        let server = Tidegate::start_with(None, &variables).await;
        let scene = Scene { directory: tempfile::tempdir().expect("a directory"), server };
        scene.looks_after(1).await;
        for version in 2..=4 {
            let looks = scene.looks();
            mount(&volume, &format!("..2026_{version}"), &limit(&version.to_string()));
            scene.shows(&[("d.one", version)]).await;
            // The next one is to be told of, and not to be found by the look at what is newly watched.
            scene.looks_after(looks).await;
        }
        assert_eq!(scene.load().await, 4, "with RUNTIME_WATCH_ROOT={is_watched}");
    }
}

#[tokio::test]
async fn a_file_in_place_of_the_app_directory_is_read_and_followed_below_a_subdirectory_with_a_slash() {
    let made = directory([("ratelimit/config", &limit("1"))]);
    let variables = [
        ("RUNTIME_ROOT", made.path().to_str().expect("text")),
        ("RUNTIME_SUBDIRECTORY", "/ratelimit"),
        ("RUNTIME_WATCH_ROOT", "false"),
    ];
    let server = Tidegate::start_with(None, &variables).await;
    let scene = Scene { directory: made, server };
    scene.shows(&[("d.one", 1)]).await;
    scene.edit("ratelimit/config", &limit("2"));
    scene.shows(&[("d.one", 2)]).await;
}
