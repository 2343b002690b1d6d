//! Draws what `benches/capacity --picture PICTURE` measured, for docs/capacity.md:
//!
//!     capacity-picture ROWS PICTURE

use std::error::Error;
use std::path::PathBuf;

use plotters::coord::Shift;
use plotters::prelude::*;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const SIZE: (u32, u32) = (892, 380);
const PAPER: RGBColor = RGBColor(0xf7, 0xf8, 0xfa);
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x45);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe7);
const MEMORY: RGBColor = RGBColor(0x3a, 0x9d, 0x5d);
const SERVER: RGBColor = RGBColor(0x2b, 0x6c, 0xc4);
const REDIS: RGBColor = RGBColor(0xd4, 0x3f, 0x3a);
/// Calls in flight in the rows that differ by their descriptors.
const USUAL: u32 = 128;

/// A measurement: its rules, the calls in flight, and microseconds per decision of the server and of Redis.
struct Row {
    rules: String,
    in_flight: u32,
    server: f64,
    redis: f64,
    is_in_redis: bool,
}

/// A line of a chart: its name, its color, and its points.
type Line = (&'static str, RGBColor, Vec<(f64, f64)>);

fn main() -> Outcome {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [rows, picture] = arguments.as_slice() else { return Err("capacity-picture ROWS PICTURE".into()) };
    let text = std::fs::read_to_string(rows)?;
    let rows = text.lines().map(Row::parse).collect::<Option<Vec<_>>>().ok_or("a row has four columns or five")?;
    // The cluster's rows come after those of one Redis.
    let first = |is_such: &dyn Fn(&&Row) -> bool, x: &dyn Fn(&Row) -> f64, y: &dyn Fn(&Row) -> f64| {
        let mut points: Vec<(f64, f64)> = Vec::new();
        for row in rows.iter().filter(is_such) {
            if points.iter().all(|(known, _)| *known != x(row)) {
                points.push((x(row), y(row)));
            }
        }
        points
    };
    let of_descriptors = |is_in_redis, y: &dyn Fn(&Row) -> f64| {
        let is_such = move |row: &&Row| {
            row.descriptors().is_some() && row.is_in_redis == is_in_redis && row.in_flight == USUAL
        };
        first(&is_such, &|row| row.descriptors().unwrap_or(0.0), y)
    };
    let of_calls = |y: &dyn Fn(&Row) -> f64| {
        let mut points = first(&|row| row.rules == "each1" && row.is_in_redis, &|row| f64::from(row.in_flight), y);
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
        points
    };
    let paper = SVGBackend::new(picture, SIZE).into_drawing_area();
    paper.fill(&PAPER)?;
    let (left, right) = paper.split_horizontally(SIZE.0 / 2);
    let lines = [
        ("server, counters in memory", MEMORY, of_descriptors(false, &|row| row.server)),
        ("server, counters in one Redis", SERVER, of_descriptors(true, &|row| row.server)),
        ("Redis", REDIS, of_descriptors(true, &|row| row.redis)),
    ];
    draw(&left, "descriptors of a request, each with a limit", lines.into())?;
    let lines = [
        ("server, counters in one Redis", SERVER, of_calls(&|row| row.server)),
        ("Redis", REDIS, of_calls(&|row| row.redis)),
    ];
    draw(&right, "calls in flight", lines.into())?;
    paper.present()?;
    Ok(())
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let mut columns = line.split_whitespace();
        let (rules, in_flight) = (columns.next()?.to_owned(), columns.next()?.parse().ok()?);
        let (server, redis) = (columns.next()?.parse().ok()?, columns.next()?.parse().ok()?);
        Some(Self { rules, in_flight, server, redis, is_in_redis: columns.next().is_some() })
    }

    /// The number of descriptors, each charged on its own.
    fn descriptors(&self) -> Option<f64> {
        self.rules.strip_prefix("each")?.parse().ok()
    }
}

/// Draws microseconds of a core per decision. Both axes are logarithmic.
fn draw(area: &DrawingArea<SVGBackend<'_>, Shift>, name: &str, lines: Vec<Line>) -> Outcome {
    let points = || lines.iter().flat_map(|(.., points)| points);
    let most = |axis: fn(&(f64, f64)) -> f64| points().map(axis).fold(1.0, f64::max);
    let least = points().map(|(_, y)| *y).fold(1.0, f64::min);
    let mut chart = ChartBuilder::on(area)
        .margin(14)
        .x_label_area_size(42)
        .y_label_area_size(54)
        .build_cartesian_2d((0.9..most(|(x, _)| *x) * 1.2).log_scale(), (least * 0.8..most(|(_, y)| *y) * 3.0).log_scale())?;
    let whole = |number: &f64| format!("{number:.1}").trim_end_matches(".0").to_owned();
    chart
        .configure_mesh()
        .x_labels(8)
        .y_labels(8)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .x_desc(name)
        .y_desc("us of a core per decision")
        .label_style(("sans-serif", 13).into_font().color(&INK))
        .axis_style(INK)
        .bold_line_style(GRID)
        .light_line_style(PAPER)
        .draw()?;
    for (name, color, points) in lines {
        chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
        chart
            .draw_series([PathElement::new(points, color.stroke_width(2))])?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .label_font(("sans-serif", 13).into_font().color(&INK))
        .draw()?;
    Ok(())
}
