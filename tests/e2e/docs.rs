//! The documents name what exists.

use bowline_tests::tools;
use std::path::Path;

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn every_test_that_proves_a_promise_exists() {
    let promises = read(&tools::folder().join("../docs/promises.md"));
    let mut named = 0;
    for code in promises.split('`').skip(1).step_by(2) {
        let Some((file, test)) = code.split_once("::").filter(|(_, test)| test.contains('_')) else {
            continue;
        };
        let source = match file.split_once('/') {
            None => read(&tools::folder().join("e2e").join(format!("{file}.rs"))),
            // A test of a crate, beside its code or in a folder of its own.
            Some((part, file)) => {
                let part = tools::folder().join("../crates").join(part);
                let places =
                    [format!("tests/{file}.rs"), format!("src/{file}.rs"), format!("src/{file}/tests.rs")];
                let sources = places.iter().map(|place| part.join(place)).filter(|path| path.is_file());
                sources.map(|path| read(&path)).collect()
            }
        };
        assert!(source.contains(&format!("fn {test}(")), "{code} does not exist");
        named += 1;
    }
    assert!(named > 50, "only {named} tests are named");
}

#[test]
fn links_between_the_documents_lead_somewhere() {
    let root = tools::folder().join("..");
    let mut followed = 0;
    for document in
        ["README.md", "CONTRIBUTING.md", "docs/protocol.md", "docs/promises.md", "docs/operations.md"]
    {
        let path = root.join(document);
        for target in read(&path).split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if target.starts_with('#') || target.contains("://") {
                continue;
            }
            let beside = path.parent().expect("a file has a folder").join(target);
            assert!(beside.exists(), "{document} links to {target}, which does not exist");
            followed += 1;
        }
    }
    assert!(followed > 5, "only {followed} links were found");
}
