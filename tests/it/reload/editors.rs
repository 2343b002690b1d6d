//! How editors write a file: loaded once it is whole, and until then nothing changes.

use super::*;

/// A server that is told of one file, and one that is told of the directory that it is in, with what they say where it is missing.
async fn scenes() -> [(Scene, &'static str); 2] {
    [
        (Scene::of_file(&rules(10)).await, "No such file"),
        (Scene::of_directory(&[("rules.yaml", &rules(10))]).await, "there is no *.yaml"),
    ]
}

impl Scene {
    fn rename(&self, from: &str, to: &str) {
        fs::rename(self.at(from), self.at(to)).expect("it is renamed");
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.at(path)).expect("it is removed");
    }

    /// Whether the rules in force are those of `limit`, as the load of this number.
    async fn stays(&self, limit: u32, load: u64) {
        assert_eq!(self.in_force().await, [("d.one".to_owned(), limit), ("d.two".to_owned(), limit)]);
        assert_eq!(self.load().await, load, "{}", self.server.log());
    }

    /// Waits until something was refused for this reason, once more than so often.
    async fn refuses(&self, words: &str, before: usize) {
        let what = format!("{words:?} is refused after {before} times");
        let refused = || self.server.log().matches("rules.rejected").count();
        eventually(&what, async || (refused() > before && self.server.log().contains(words)).then_some(())).await;
        assert_eq!(refused(), before + 1, "{}", self.server.log());
    }
}

#[tokio::test]
async fn a_file_that_vim_writes_is_loaded_once_it_is_whole() {
    for (scene, missing) in scenes().await {
        // Whether a file can be made here, which vim tries first.
        scene.edit("4913", "");
        scene.remove("4913");
        scene.rename("rules.yaml", "rules.yaml~");
        scene.refuses(missing, 0).await;
        scene.stays(10, 1).await;
        // It pauses in the middle of a line.
        let whole = rules(20);
        let (half, _) = whole.split_once("per_unit: 20 } }\n").expect("a first rule");
        scene.edit("rules.yaml", half);
        scene.refuses("rules.yaml:3", 1).await;
        scene.stays(10, 1).await;
        scene.edit("rules.yaml", &whole);
        scene.shows(&[("d.one", 20), ("d.two", 20)]).await;
        scene.remove("rules.yaml~");
        // All of it again, as fast as vim does it.
        scene.edit("4913", "");
        scene.remove("4913");
        scene.rename("rules.yaml", "rules.yaml~");
        scene.edit("rules.yaml", &rules(30));
        scene.remove("rules.yaml~");
        scene.shows(&[("d.one", 30), ("d.two", 30)]).await;
        scene.stays(30, 3).await;
    }
}

#[tokio::test]
async fn a_file_renamed_over_is_loaded_once_and_what_is_written_beside_it_never() {
    for (scene, _) in scenes().await {
        // What editors leave beside a file says something else of the same rules.
        for beside in [".rules.yaml.swp", "#rules.yaml#", "rules.yaml~"] {
            scene.edit(beside, &rules(11));
        }
        scene.edit("rules.yaml.tmp", &rules(20));
        scene.rename("rules.yaml.tmp", "rules.yaml");
        scene.shows(&[("d.one", 20), ("d.two", 20)]).await;
        scene.stays(20, 2).await;
        assert!(!scene.server.log().contains("ERROR"), "{}", scene.server.log());
    }
}

#[tokio::test]
async fn a_file_removed_and_made_again_is_loaded_if_it_says_something_else() {
    for (scene, missing) in scenes().await {
        scene.remove("rules.yaml");
        // More than a second after it: that is when it is looked at the latest.
        scene.refuses(missing, 0).await;
        scene.stays(10, 1).await;
        scene.edit("rules.yaml", &rules(10));
        scene.says("rules.restored").await;
        scene.stays(10, 1).await;
        scene.remove("rules.yaml");
        scene.refuses(missing, 1).await;
        scene.edit("rules.yaml", &rules(20));
        scene.shows(&[("d.one", 20), ("d.two", 20)]).await;
        scene.stays(20, 2).await;
    }
}
