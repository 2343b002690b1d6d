//! YAML as a tree with places. It stores the events of granit-parser in one flat list, so no file causes recursion or copies.
//!
//! An alias points to its target and is never expanded. It counts toward the maxima as if it were expanded.

use std::collections::BTreeMap;

use granit_parser::{ErrorKind, Event, Marker, Parser, ScalarStyle, StrInput, Tag};

use super::problem::{Report, quoted};
use crate::rules::tree::Position;

pub(crate) mod scalar;

use scalar::Scalar;

/// Maximum nesting of a file with aliases expanded: 100 levels.
/// A rule takes two levels (its list and itself), so this exceeds the depth of any descriptor in a request.
const MAX_DEPTH: usize = 100;

/// Maximum number of scalars, lists and mappings of a file with aliases expanded: 2,000,000.
/// 100,000 rules of `key`, `value` and `rate_limit` have 1,100,000. Each takes 20 bytes while the file is read.
const MAX_NODES: usize = 2_000_000;

/// Maximum number of anchors of a file: 100,000, one for each rule of the largest file considered.
/// The parser remembers their names.
const MAX_ANCHORS: usize = 100_000;

/// Maximum number of events of a second document that are searched for its domain: 1,000.
/// The domain is near the top of every file. Rules of the second document are not read.
const SECOND_DOCUMENT_EVENTS: usize = 1_000;

/// The first document of a file.
#[derive(Debug, Default)]
pub(crate) struct Tree {
    /// Nodes in file order; the content of a list or mapping follows it.
    items: Vec<YamlItem>,
    /// Texts of all scalars, concatenated.
    texts: String,
}

/// A node at its place of use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node<'t> {
    /// Position of the node, or of the alias that refers to it.
    pub(crate) place: Position,
    tree: &'t Tree,
    index: usize,
}

/// Content of a node.
#[derive(Clone, Debug)]
pub(crate) enum Content<'t> {
    /// An unquoted scalar.
    Plain(&'t str),
    /// A quoted scalar or block scalar.
    Text(&'t str),
    /// A list.
    List(Nodes<'t>),
    /// A mapping; [`Nodes::next_pair`] gives its keys and values.
    Mapping(Nodes<'t>),
    /// A node with an error that is already reported.
    Broken,
}

/// The nodes of a list, or the alternating keys and values of a mapping.
#[derive(Clone, Debug)]
pub(crate) struct Nodes<'t> {
    tree: &'t Tree,
    next: usize,
    end: usize,
}

#[derive(Clone, Copy, Debug)]
struct YamlItem {
    place: Position,
    kind: NodeKind,
}

/// Kind of an item. Its indexes fit in 32 bits, because [`MAX_NODES`] and the maximum file size bound them.
#[derive(Clone, Copy, Debug)]
enum NodeKind {
    Plain { from: u32, to: u32 },
    Text { from: u32, to: u32 },
    List { end: u32 },
    Mapping { end: u32 },
    Alias { target: u32 },
    Broken,
}

/// A list or mapping that is not closed yet.
struct Open {
    index: usize,
    anchor: usize,
    nodes_before: usize,
    height: usize,
}

/// Target of an anchor.
#[derive(Clone, Copy)]
enum Anchor {
    /// The target is not closed yet.
    Open,
    Closed {
        index: usize,
        nodes: usize,
        height: usize,
    },
}

/// Stops the parser. The reason is already reported.
struct ParserStop;

struct Builder<'r> {
    tree: Tree,
    open: Vec<Open>,
    anchors: BTreeMap<usize, Anchor>,
    /// Number of nodes so far, with aliases expanded.
    nodes: usize,
    report: &'r mut Report,
}

/// Parses the first document of `text`; empty if there is none. Returns `None` if it is not YAML or exceeds a maximum.
pub(crate) fn parse(text: &str, report: &mut Report) -> Option<Tree> {
    let options = granit_parser::options! { emit_comments: false, emit_unresolved_aliases: true };
    let mut parser = Parser::new_from_str_with_options(text, options);
    let mut tree = Tree::default();
    // Reserves the maximum at once, so that growing copies nothing. The system only allocates the pages in use.
    tree.items.reserve_exact(MAX_NODES.min(text.len() + 1));
    tree.texts.reserve_exact(text.len());
    let mut builder = Builder { tree, open: Vec::new(), anchors: BTreeMap::new(), nodes: 0, report };
    loop {
        match parser.next_event() {
            Some(Ok((Event::DocumentEnd, _))) => break,
            None | Some(Ok((Event::StreamEnd, _))) => return Some(builder.tree),
            // The parser gives `~` for a value that is not written.
            Some(Ok((Event::Scalar(text, ScalarStyle::Plain, anchor, tag), span)))
                if span.is_empty() && text == "~" =>
            {
                let empty = Event::Scalar("".into(), ScalarStyle::Plain, anchor, tag);
                builder.event(empty, place_of(&span.start)).ok()?;
            }
            Some(Ok((event, span))) => builder.event(event, place_of(&span.start)).ok()?,
            Some(Err(error)) => {
                let place = place_of(error.marker());
                builder.syntax_error(place, error.kind(), text.contains("{{"));
                return None;
            }
        }
    }
    let Builder { tree, report, .. } = builder;
    second_document(&mut parser, report).ok()?;
    Some(tree)
}

impl Tree {
    /// Returns the root node; `None` if the file has no document.
    pub(crate) fn root(&self) -> Option<Node<'_>> {
        self.node(0)
    }

    /// Returns the node at `index`, or the target of the alias there.
    fn node(&self, index: usize) -> Option<Node<'_>> {
        let item = self.items.get(index)?;
        let index = match item.kind {
            NodeKind::Alias { target } => wide(target),
            _ => index,
        };
        Some(Node { place: item.place, tree: self, index })
    }

    fn text(&self, from: u32, to: u32) -> &str {
        self.texts.get(wide(from)..wide(to)).unwrap_or_default()
    }
}

impl<'t> Node<'t> {
    /// Returns the content of the node.
    pub(crate) fn content(self) -> Content<'t> {
        let tree = self.tree;
        let nodes = |end| Nodes { tree, next: self.index + 1, end: wide(end) };
        match tree.items.get(self.index).map(|item| item.kind) {
            Some(NodeKind::Plain { from, to }) => Content::Plain(tree.text(from, to)),
            Some(NodeKind::Text { from, to }) => Content::Text(tree.text(from, to)),
            Some(NodeKind::List { end }) => Content::List(nodes(end)),
            Some(NodeKind::Mapping { end }) => Content::Mapping(nodes(end)),
            Some(NodeKind::Alias { .. } | NodeKind::Broken) | None => Content::Broken,
        }
    }

    /// Returns true if the node is null or an empty text.
    pub(crate) fn is_blank(self) -> bool {
        matches!(self.content(), Content::Text("")) || self.is_null()
    }

    /// Returns true if no value is written, not even `null`.
    pub(crate) fn is_unwritten(self) -> bool {
        matches!(self.content(), Content::Plain(""))
    }

    /// Returns true if the node is null, or a list or a mapping without items.
    pub(crate) fn is_nothing(self) -> bool {
        match self.content() {
            Content::List(mut items) | Content::Mapping(mut items) => items.next().is_none(),
            _ => self.is_blank(),
        }
    }

    /// Returns true if the node is null.
    pub(crate) fn is_null(self) -> bool {
        matches!(self.content(), Content::Plain(text) if scalar::is_null(text))
    }
}

impl<'t> Nodes<'t> {
    /// Returns the next key of a mapping and its value.
    pub(crate) fn next_pair(&mut self) -> Option<(Node<'t>, Node<'t>)> {
        Some((self.next()?, self.next()?))
    }
}

impl<'t> Iterator for Nodes<'t> {
    type Item = Node<'t>;

    fn next(&mut self) -> Option<Node<'t>> {
        if self.next >= self.end {
            return None;
        }
        let index = self.next;
        self.next = match self.tree.items.get(index)?.kind {
            NodeKind::List { end } | NodeKind::Mapping { end } => wide(end),
            _ => index + 1,
        };
        self.tree.node(index)
    }
}

impl Builder<'_> {
    fn event(&mut self, event: Event<'_>, place: Position) -> Result<(), ParserStop> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let kind = self.scalar(&text, style, tag.as_deref(), place);
                let index = self.add(place, kind, 1, 0)?;
                self.anchor(place, anchor, Anchor::Closed { index, nodes: 1, height: 0 })
            }
            Event::SequenceStart(_, anchor, _) => self.start(place, anchor, NodeKind::List { end: u32::MAX }),
            Event::MappingStart(_, anchor, _) => self.start(place, anchor, NodeKind::Mapping { end: u32::MAX }),
            Event::SequenceEnd | Event::MappingEnd => self.end(place),
            Event::Alias(anchor) => match self.anchors.get(&anchor).copied() {
                Some(Anchor::Closed { index, nodes, height }) => {
                    self.add(place, NodeKind::Alias { target: narrow(index) }, nodes, height).map(drop)
                }
                Some(Anchor::Open) => {
                    self.report.error(place, || {
                        "This alias refers to a value that contains it, so it never ends: write the values here instead."
                            .to_owned()
                    });
                    self.add(place, NodeKind::Broken, 1, 0).map(drop)
                }
                None => self.add(place, NodeKind::Broken, 1, 0).map(drop),
            },
            Event::UnresolvedAlias(name) => {
                self.report.error(place, || {
                    let (anchor, text) = (quoted(&format!("&{name}")), quoted(&format!("\"*{name}\"")));
                    format!(
                        "This alias has no anchor: write the anchor {anchor} above it, or, if it is a text, write quotes \
                         around it: {text}."
                    )
                });
                self.add(place, NodeKind::Broken, 1, 0).map(drop)
            }
            _ => Ok(()),
        }
    }

    fn scalar(&mut self, text: &str, style: ScalarStyle, tag: Option<&Tag>, place: Position) -> NodeKind {
        let from = narrow(self.tree.texts.len());
        self.tree.texts.push_str(text);
        let to = narrow(self.tree.texts.len());
        let is_plain = match tag {
            None => style == ScalarStyle::Plain,
            Some(tag) => match tag.core_suffix() {
                Some(kind @ ("bool" | "int" | "float" | "null")) => {
                    if !is_of(scalar::resolve(text), kind) {
                        self.report.error(place, || {
                            format!(
                                "{} is not a valid `!!{kind}`: remove the tag, or write a value of that type.",
                                quoted(text)
                            )
                        });
                        return NodeKind::Broken;
                    }
                    true
                }
                // Every other tag makes a text, as in yaml.v2.
                _ => {
                    if tag.suffix_in_namespace("tag:yaml.org,2002:").is_some_and(|suffix| suffix == "binary") {
                        self.report.warning(place, || {
                            format!(
                                "{} stays as it is written, but envoyproxy/ratelimit decodes `!!binary`: write the decoded text without the tag.",
                                quoted(text)
                            )
                        });
                    }
                    false
                }
            },
        };
        if is_plain { NodeKind::Plain { from, to } } else { NodeKind::Text { from, to } }
    }

    fn start(&mut self, place: Position, anchor: usize, kind: NodeKind) -> Result<(), ParserStop> {
        let nodes_before = self.nodes;
        let index = self.add(place, kind, 1, 0)?;
        self.open.push(Open { index, anchor, nodes_before, height: 0 });
        self.anchor(place, anchor, Anchor::Open)
    }

    fn end(&mut self, place: Position) -> Result<(), ParserStop> {
        let Some(Open { index, anchor, nodes_before, height }) = self.open.pop() else { return Ok(()) };
        let ends_at = narrow(self.tree.items.len());
        if let Some(NodeKind::List { end } | NodeKind::Mapping { end }) =
            self.tree.items.get_mut(index).map(|item| &mut item.kind)
        {
            *end = ends_at;
        }
        self.raise(height);
        self.anchor(place, anchor, Anchor::Closed { index, nodes: self.nodes - nodes_before, height })
    }

    /// Adds an item that counts as `nodes` nodes and is `height` levels high.
    fn add(&mut self, place: Position, kind: NodeKind, nodes: usize, height: usize) -> Result<usize, ParserStop> {
        self.nodes = self.nodes.saturating_add(nodes);
        if self.nodes > MAX_NODES {
            self.report.error(place, || {
                format!(
                    "The file is too large: it has more than {MAX_NODES} values up to this place, with aliases \
                     expanded. Write fewer rules, or fewer aliases."
                )
            });
            return Err(ParserStop);
        }
        if self.open.len().saturating_add(height) >= MAX_DEPTH {
            self.report.error(place, too_deep);
            return Err(ParserStop);
        }
        self.raise(height);
        let index = self.tree.items.len();
        self.tree.items.push(YamlItem { place, kind });
        Ok(index)
    }

    /// Raises the height of the innermost open list or mapping above a child of `height` levels.
    fn raise(&mut self, height: usize) {
        if let Some(open) = self.open.last_mut() {
            open.height = open.height.max(height + 1);
        }
    }

    fn anchor(&mut self, place: Position, id: usize, anchor: Anchor) -> Result<(), ParserStop> {
        // The parser uses 0 for no anchor.
        if id == 0 {
            return Ok(());
        }
        self.anchors.insert(id, anchor);
        if self.anchors.len() > MAX_ANCHORS {
            self.report.error(place, || format!("The file has more than {MAX_ANCHORS} anchors: use fewer."));
            return Err(ParserStop);
        }
        Ok(())
    }

    /// Reports an error of a file that is a template if `is_template`.
    fn syntax_error(&mut self, place: Position, error: &ErrorKind, is_template: bool) {
        self.report.error(place, || match error {
            ErrorKind::RecursionLimitExceeded => too_deep(),
            error if is_template => {
                format!("This is not YAML: {error}. The file has `{{{{`, so it looks like a template: render it before Tidegate reads it, for example with `helm template`.")
            }
            error => format!("This is not YAML: {error}{}.", advice(error)),
        });
    }
}

/// Returns advice for the most common errors, for readers without knowledge of YAML.
fn advice(error: &ErrorKind) -> &'static str {
    match error {
        ErrorKind::TabNotAllowed
        | ErrorKind::TabInBlockIndentation
        | ErrorKind::TabInIndentation
        | ErrorKind::TabInPlainScalar
        | ErrorKind::TabAtBlockScalarStart => ". Indent with spaces, here and on the lines below",
        ErrorKind::UnexpectedEofFlowMapping
        | ErrorKind::UnexpectedEofFlowSequence
        | ErrorKind::ExpectedFlowMappingSeparator
        | ErrorKind::ExpectedFlowSequenceSeparator
        | ErrorKind::UnclosedFlowCollection { .. } => ". A `{` or `[` above is not closed, or a comma is missing",
        ErrorKind::MissingAnchorOrAliasName => ". Write quotes around a text that begins with `*` or `&`",
        ErrorKind::UnexpectedCharacter { .. } => ". Write quotes around a text that begins with this character",
        ErrorKind::UnclosedQuotedScalar | ErrorKind::InvalidQuotedScalarIndent => {
            ". Close the open quotes, here or above"
        }
        ErrorKind::MappingValueNotAllowed => {
            ". Write quotes around a text that contains a colon and a space. If there is none, begin all keys of one item in \
             the same column"
        }
        ErrorKind::InvalidIndentation
        | ErrorKind::ExpectedBlockMappingKey
        | ErrorKind::ExpectedBlockSequenceEntry
        | ErrorKind::BlockSequenceEntryNotAllowed
        | ErrorKind::MappingKeyNotAllowed
        | ErrorKind::SimpleKeyExpected
        | ErrorKind::InvalidSimpleKey => ". Begin all keys of one item in the same column, and all `-` of one list too",
        _ => "",
    }
}

/// Reports a second document. Only the first one is enforced, as in the reference, which reads no further.
fn second_document<'t>(parser: &mut Parser<'t, StrInput<'t>>, report: &mut Report) -> Result<(), ParserStop> {
    let place = match parser.next_event() {
        Some(Ok((Event::DocumentStart(..), span))) => place_of(&span.start),
        Some(Err(error)) => {
            report.error(place_of(error.marker()), || {
                let kind = error.kind();
                format!("This is not YAML, so the rules below it cannot be read: {kind}{}.", advice(kind))
            });
            return Err(ParserStop);
        }
        _ => return Ok(()),
    };
    let mut depth = 0_usize;
    let mut domain = None;
    let mut is_key = true;
    let mut is_domain = false;
    for count in 0..SECOND_DOCUMENT_EVENTS {
        let Some(Ok((event, _))) = parser.next_event() else { break };
        match event {
            // An empty document after a last `---` loses nothing.
            Event::Scalar(text, ScalarStyle::Plain, ..) if count == 0 && scalar::is_null(&text) => return Ok(()),
            Event::Scalar(text, ..) if depth == 1 => {
                if is_domain && !is_key {
                    domain = Some(quoted(&text));
                    break;
                }
                is_domain = is_key && text == "domain";
                is_key = !is_key;
            }
            Event::Alias(_) | Event::UnresolvedAlias(_) if depth == 1 => is_key = !is_key,
            Event::MappingStart(..) | Event::SequenceStart(..) => depth += 1,
            Event::MappingEnd | Event::SequenceEnd => {
                depth = depth.saturating_sub(1);
                if depth == 1 {
                    is_key = !is_key;
                }
            }
            Event::DocumentEnd => break,
            _ => {}
        }
    }
    report.loss(place, || match domain {
        Some(domain) => format!(
            "A second document begins here, and its rules of domain {domain} are not enforced: move them to a separate file."
        ),
        None => "A second document begins here, and it is not read: move its content to the first document, or to a separate file."
            .to_owned(),
    });
    Ok(())
}

fn too_deep() -> String {
    format!("This is nested more than {MAX_DEPTH} levels deep, with aliases expanded: use fewer levels.")
}

fn is_of(scalar: Scalar, kind: &str) -> bool {
    match kind {
        "bool" => matches!(scalar, Scalar::Bool(_)),
        "int" => matches!(scalar, Scalar::Int { .. }),
        "float" => matches!(scalar, Scalar::Int { .. } | Scalar::Float(_)),
        _ => matches!(scalar, Scalar::Null),
    }
}

fn place_of(marker: &Marker) -> Position {
    Position { line: narrow(marker.line()), column: narrow(marker.col()).saturating_add(1) }
}

fn narrow(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn wide(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
