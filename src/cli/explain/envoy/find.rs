//! The calls to the rate limit service that a configuration of Envoy describes.

use super::fields::{Fields, Known};
use crate::rulefile::yaml::{Content, Node};

/// Type of the HTTP filter that asks the service.
const FILTER: &str = ".filters.http.ratelimit.v3.RateLimit";
/// Type of its configuration for a route.
const PER_ROUTE: &str = ".filters.http.ratelimit.v3.RateLimitPerRoute";
/// Part of the types of the filter that counts in Envoy itself.
const LOCAL: &str = ".local_ratelimit.";

/// Filter that asks the service. Without the file that has it, all of it is unknown.
#[derive(Clone, Copy, Default)]
pub(super) struct Filter<'t> {
    pub(super) name: Option<&'t str>,
    config: Option<Node<'t>>,
}

/// A place for lists of actions: a route, a virtual host, or a list alone.
#[derive(Clone)]
pub(super) struct Site<'t> {
    /// Filters in front of it; `None` if the file does not say.
    filters: Option<Vec<Filter<'t>>>,
    config: Option<Node<'t>>,
    pub(super) host: Option<Node<'t>>,
    pub(super) route: Option<Node<'t>>,
    /// List that belongs to no known route.
    list: Option<Node<'t>>,
}

/// One call of a filter for the requests of a site.
pub(super) struct Call<'t> {
    pub(super) filter: Option<&'t str>,
    pub(super) domain: Option<&'t str>,
    pub(super) lists: Vec<List<'t>>,
}

/// A list of `rate_limits` that a call takes its descriptors from.
#[derive(Clone, Copy)]
pub(super) struct List<'t> {
    pub(super) node: Node<'t>,
    /// Stage of the filter, which selects items; `None` if it selects none or is unknown.
    pub(super) stage: Option<i64>,
    /// True if it is the list of a route or a virtual host itself, in which `hits_addend` has no effect.
    pub(super) is_of_route: bool,
}

/// All that is found in the documents of a file.
#[derive(Default)]
pub(super) struct Found<'t> {
    sites: Vec<Site<'t>>,
    filters: Vec<Filter<'t>>,
    /// Number of configurations of the filter that counts in Envoy itself.
    pub(super) local: usize,
    pub(super) source_cluster: Option<&'t str>,
}

/// Surroundings of a node.
#[derive(Clone, Default)]
struct Around<'t> {
    filters: Option<Vec<Filter<'t>>>,
    config: Option<Node<'t>>,
}

impl<'t> Found<'t> {
    /// Adds what a document has.
    pub(super) fn add(&mut self, document: Node<'t>) {
        self.source_cluster = self.source_cluster.or(document.field("node").and_then(|node| node.text_of("cluster")));
        self.walk(document, &Around::default());
    }

    /// Returns all sites. Without any route, each list of a filter is one.
    pub(super) fn sites(&self) -> Vec<Site<'t>> {
        if !self.sites.is_empty() {
            return self.sites.clone();
        }
        let with_lists = self.filters.iter().filter_map(|filter| Some((*filter, limits(filter.config)?)));
        with_lists.map(|(filter, list)| Site { list: Some(list), filters: Some(vec![filter]), ..Site::new() }).collect()
    }

    /// Returns the calls for requests of `site`.
    pub(super) fn calls(&self, site: &Site<'t>) -> Vec<Call<'t>> {
        let mut filters = site.filters.as_ref().unwrap_or(&self.filters).clone();
        if filters.is_empty() && site.filters.is_none() {
            let names = site.levels().into_iter().flat_map(per_routes).map(|(name, _)| name);
            for name in names {
                if !filters.iter().any(|filter| filter.name == Some(name)) {
                    filters.push(Filter { name: Some(name), config: None });
                }
            }
        }
        if filters.is_empty() && site.filters.is_none() {
            filters.push(Filter::default());
        }
        filters.into_iter().map(|filter| site.call(filter)).filter(|call| !call.lists.is_empty()).collect()
    }

    fn walk(&mut self, node: Node<'t>, around: &Around<'t>) {
        match node.content() {
            Content::List(_) if is_limits(node) => self.site(around, Site { list: Some(node), ..Site::new() }),
            Content::List(items) => items.for_each(|item| self.walk(item, around)),
            Content::Mapping(_) => self.mapping(node, around),
            _ => {}
        }
    }

    fn mapping(&mut self, node: Node<'t>, around: &Around<'t>) {
        if node.text_of("@type").is_some_and(|name| name.contains(LOCAL)) {
            self.local += 1;
            return;
        }
        let bare = node.has_type(FILTER).then_some(Filter { name: None, config: Some(node) });
        if let Some(filter) = filter(node).or(bare) {
            self.filters.push(filter);
            return;
        }
        let mut around = around.clone();
        if let Some(filters) = node.field("http_filters") {
            let filters: Vec<_> = filters.items().filter_map(filter).collect();
            self.filters.extend(&filters);
            around.filters = Some(filters);
        }
        if node.field("virtual_hosts").is_some() {
            around.config = Some(node);
        }
        if node.field("domains").is_some() && (node.field("routes").is_some() || node.field("rate_limits").is_some()) {
            let mut routes = node.field("routes").into_iter().flat_map(Fields::items).peekable();
            if routes.peek().is_none() {
                self.site(&around, Site { host: Some(node), ..Site::new() });
            }
            routes.for_each(|route| self.site(&around, Site { host: Some(node), route: Some(route), ..Site::new() }));
            return;
        }
        let has_own = node.field("route").is_some_and(|action| action.field("rate_limits").is_some());
        if has_own || (node.field("virtual_hosts").is_none() && per_routes(node).next().is_some()) {
            self.site(&around, Site { route: Some(node), ..Site::new() });
            return;
        }
        for (name, value) in node.fields() {
            // They are read above, and their own lists belong to the routes.
            if !super::fields::is_name(name, "http_filters") {
                self.walk(value, &around);
            }
        }
    }

    fn site(&mut self, around: &Around<'t>, site: Site<'t>) {
        let filters = site.filters.or_else(|| around.filters.clone());
        self.sites.push(Site { filters, config: around.config, ..site });
    }
}

impl<'t> Site<'t> {
    fn new() -> Self {
        Self { filters: None, config: None, host: None, route: None, list: None }
    }

    /// Returns the node that the site begins with.
    pub(super) fn node(&self) -> Option<Node<'t>> {
        self.route.or(self.host).or(self.list)
    }

    /// Returns the cluster that the route sends requests to.
    pub(super) fn cluster(&self) -> Known<&'t str> {
        let action = self.route.and_then(|route| route.field("route"));
        let cluster = action.and_then(|action| action.text_of("cluster"));
        cluster.ok_or_else(|| "the file does not say to which one cluster the route sends".to_owned())
    }

    /// Returns the route, its virtual host and its route configuration, as far as known: the most specific first.
    fn levels(&self) -> Vec<Node<'t>> {
        [self.route, self.host, self.config].into_iter().flatten().collect()
    }

    /// Returns the call of a filter. Its lists are those of the most specific configuration of the filter, else those of the filter, else those of the
    /// route and its virtual host.
    fn call(&self, filter: Filter<'t>) -> Call<'t> {
        let own =
            |level: Node<'t>| per_routes(level).find(|(name, _)| filter.name.is_none_or(|filter| filter == *name));
        let per_route = self.levels().into_iter().find_map(own).map(|(_, config)| config);
        let domain = |config: Option<Node<'t>>| config?.text_of("domain").filter(|domain| !domain.is_empty());
        let lists = if let Some(node) = self.list {
            vec![List { node, stage: filter.config.map(stage), is_of_route: false }]
        } else if let Some(node) = limits(per_route).or_else(|| limits(filter.config)) {
            vec![List { node, stage: None, is_of_route: false }]
        } else {
            self.of_route(filter, per_route)
        };
        Call { filter: filter.name, domain: domain(per_route).or_else(|| domain(filter.config)), lists }
    }

    /// Returns the lists of the route and its virtual host.
    fn of_route(&self, filter: Filter<'t>, per_route: Option<Node<'t>>) -> Vec<List<'t>> {
        let action = self.route.and_then(|route| route.field("route"));
        let own = limits(action);
        let option = per_route.and_then(|config| config.text_of("vh_rate_limits")).unwrap_or("OVERRIDE");
        let includes = action.and_then(|action| action.flag_of("include_vh_rate_limits")) == Some(true);
        let of_host = match option {
            _ if includes => true,
            "INCLUDE" => true,
            "IGNORE" => false,
            _ => own.is_none(),
        };
        let stage = Some(filter.config.map_or(0, stage));
        let lists = own.into_iter().chain(limits(self.host).filter(|_| of_host));
        lists.map(|node| List { node, stage, is_of_route: true }).collect()
    }
}

/// Returns the filter of an item of `http_filters` if it asks the service.
fn filter(item: Node<'_>) -> Option<Filter<'_>> {
    let config = item.field("typed_config").filter(|config| config.has_type(FILTER))?;
    Some(Filter { name: item.text_of("name"), config: Some(config) })
}

/// Returns the configurations of the filter in a route, virtual host or route configuration, with the names of the filters that they are for.
fn per_routes(level: Node<'_>) -> impl Iterator<Item = (&str, Node<'_>)> {
    let configs = level.field("typed_per_filter_config").into_iter().flat_map(Fields::fields);
    configs
        .map(|(name, config)| (name, config.field("config").unwrap_or(config)))
        .filter(|(_, config)| config.has_type(PER_ROUTE))
}

/// Returns true for a list of items with `actions`.
fn is_limits(list: Node<'_>) -> bool {
    list.items().next().is_some_and(|item| item.field("actions").is_some())
}

/// Returns the `rate_limits` of a message, if it has any.
fn limits(message: Option<Node<'_>>) -> Option<Node<'_>> {
    message?.field("rate_limits").filter(|list| is_limits(*list))
}

fn stage(config: Node<'_>) -> i64 {
    config.number_of("stage").unwrap_or(0)
}
