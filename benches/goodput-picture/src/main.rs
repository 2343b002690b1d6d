//! Draws what `benches/goodput --rows ROWS` measured, for docs/performance.md:
//!
//!     goodput-picture ROWS PICTURE

use std::error::Error;
use std::path::{Path, PathBuf};

use plotters::chart::MeshStyle;
use plotters::coord::Shift;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
type Paper<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (892, 620);
const PAPER: RGBColor = RGBColor(0xf7, 0xf8, 0xfa);
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x45);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe7);
/// One binary each, in the order of the rows.
const COLORS: [RGBColor; 3] = [RGBColor(0xd4, 0x3f, 0x3a), RGBColor(0x2b, 0x6c, 0xc4), RGBColor(0x3a, 0x9d, 0x5d)];
/// The rows of a course, second by second, instead of a load.
const SECONDS: &str = "seconds";

/// The end of the name of a load of so many calls in flight.
const IN_FLIGHT: &str = " in flight";

/// What was measured: of which binary, where, under which load, and the value.
struct Row {
    binary: String,
    place: String,
    load: String,
    value: f64,
}

fn main() -> Outcome {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [rows, picture] = arguments.as_slice() else { return Err("goodput-picture ROWS PICTURE".into()) };
    let text = std::fs::read_to_string(rows)?;
    let rows = text.lines().map(Row::parse).collect::<Option<Vec<_>>>().ok_or("a row has four columns")?;
    draw(picture, &rows)
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let mut columns = line.split('\t').map(str::to_owned);
        let (binary, place, load) = (columns.next()?, columns.next()?, columns.next()?);
        Some(Self { binary, place, load, value: columns.next()?.parse().ok()? })
    }
}

/// What is told by a column, once each, in order.
fn distinct<'a>(rows: &'a [Row], column: impl Fn(&'a Row) -> &'a str) -> Vec<&'a str> {
    let mut all = Vec::new();
    for told in rows.iter().map(column) {
        if !all.contains(&told) {
            all.push(told);
        }
    }
    all
}

fn draw(path: &Path, rows: &[Row]) -> Outcome {
    let binaries = distinct(rows, |row| &row.binary);
    let paper = SVGBackend::new(path, SIZE).into_drawing_area();
    paper.fill(&PAPER)?;
    let (head, rest) = paper.split_vertically(44);
    write(&head, "Requests that Redis decided", (16, 24), 22.0)?;
    for (index, (binary, color)) in binaries.iter().zip(COLORS).enumerate() {
        let x = 360 + 260 * i32::try_from(index)?;
        head.draw(&Rectangle::new([(x, 18), (x + 12, 30)], color.filled()))?;
        write(&head, binary, (x + 18, 24), 16.0)?;
    }
    let (shares, course) = rest.split_vertically(300);
    let places: Vec<_> = distinct(rows, |row| &row.place).into_iter().filter(|place| *place != SECONDS).collect();
    for (area, place) in shares.split_evenly((1, places.len())).iter().zip(&places) {
        let rows: Vec<_> = rows.iter().filter(|row| row.place == *place).collect();
        draw_shares(area, place, &binaries, &rows)?;
    }
    let rows: Vec<_> = rows.iter().filter(|row| row.place == SECONDS).collect();
    draw_course(&course, &binaries, &rows)?;
    paper.present()?;
    Ok(())
}

/// Whether a load is so many calls in flight.
fn is_closed(row: &Row) -> bool {
    row.load.ends_with(IN_FLIGHT)
}

/// Of each load, the share of what can be decided that was.
fn draw_shares(area: &Paper<'_>, place: &str, binaries: &[&str], rows: &[&Row]) -> Outcome {
    let of = |binary: &str| rows.iter().filter(|row| row.binary == binary).copied().collect::<Vec<_>>();
    let loads: Vec<_> = of(binaries[0]).iter().map(|row| row.load.replace(IN_FLIGHT, "")).collect();
    let last = loads.len().saturating_sub(1) as f64;
    let (title, chart) = area.split_vertically(28);
    write(&title, place, (76, 14), 16.0)?;
    let mut chart = with_margins(&chart).build_cartesian_2d(-0.3..last + 0.3, 0.0..1.05)?;
    let load = |load: &f64| loads.get(load.round() as usize).cloned().unwrap_or_default();
    let percent = |share: &f64| format!("{:.0} %", share * 100.0);
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .x_labels(loads.len())
        .x_label_formatter(&load)
        .x_desc("calls in flight; calls a second as a multiple (x)")
        .y_labels(6)
        .y_label_formatter(&percent);
    draw_mesh(&mut mesh)?;
    for (binary, color) in binaries.iter().zip(COLORS) {
        let points: Vec<_> =
            of(binary).into_iter().enumerate().map(|(load, row)| (row, (load as f64, row.value))).collect();
        // A closed loop and an open one are two lines.
        for points in points.chunk_by(|(one, _), (other, _)| is_closed(one) == is_closed(other)) {
            let points: Vec<_> = points.iter().map(|(_, point)| *point).collect();
            chart.draw_series(points.iter().map(|point| Circle::new(*point, 3, color.filled())))?;
            chart.draw_series([PathElement::new(points, color.stroke_width(2))])?;
        }
    }
    Ok(())
}

/// Second by second, while one Redis is ten times slower for ten seconds.
fn draw_course(area: &Paper<'_>, binaries: &[&str], rows: &[&Row]) -> Outcome {
    let of = |binary: &str| rows.iter().filter(|row| row.binary == binary).map(|row| row.value).collect::<Vec<_>>();
    let most = rows.iter().map(|row| row.value).fold(1.0, f64::max);
    let seconds = of(binaries[0]).len() as f64;
    let (title, chart) = area.split_vertically(28);
    write(&title, "one Redis that is ten times slower for ten seconds, 1.5 times what it can", (76, 14), 16.0)?;
    let mut chart = with_margins(&chart).build_cartesian_2d(0.0..seconds, 0.0..most * 1.1)?;
    let whole = |number: &f64| format!("{number:.0}");
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().x_desc("seconds").x_label_formatter(&whole).y_labels(5).y_label_formatter(&whole);
    draw_mesh(&mut mesh)?;
    for (binary, color) in binaries.iter().zip(COLORS) {
        let steps = of(binary).into_iter().enumerate();
        let steps = steps.flat_map(|(second, decided)| [(second as f64, decided), (second as f64 + 1.0, decided)]);
        chart.draw_series([PathElement::new(steps.collect::<Vec<_>>(), color.stroke_width(2))])?;
    }
    Ok(())
}

fn with_margins<'a, 'b>(area: &'a Paper<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(area);
    chart.margin_left(12).margin_right(16).x_label_area_size(40).y_label_area_size(52);
    chart
}

/// Draws the lines and labels of a chart.
fn draw_mesh<X, Y>(mesh: &mut MeshStyle<'_, '_, X, Y, SVGBackend<'_>>) -> Outcome
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    mesh.bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .axis_style(GRID)
        .label_style(("sans-serif", 13.0, &INK))
        .draw()?;
    Ok(())
}

fn write(area: &Paper<'_>, words: &str, place: (i32, i32), size: f64) -> Outcome {
    let style = TextStyle::from(("sans-serif", size)).color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw(&Text::new(words.to_owned(), place, style))?;
    Ok(())
}
