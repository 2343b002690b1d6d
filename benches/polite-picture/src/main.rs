//! Draws what `benches/polite --rows ROWS` measured, for examples/clients/README.md:
//!
//!     polite-picture ROWS PICTURE

use std::error::Error;
use std::path::{Path, PathBuf};

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
type Paper<'a> = DrawingArea<SVGBackend<'a>, Shift>;

const SIZE: (u32, u32) = (892, 560);
const PAPER: RGBColor = RGBColor(0xf7, 0xf8, 0xfa);
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x45);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe7);
const ADMITTED: RGBColor = RGBColor(0x2b, 0x6c, 0xc4);
const REFUSED: RGBColor = RGBColor(0xd4, 0x3f, 0x3a);
/// The algorithm that is drawn.
const ALGORITHM: &str = "gcra";
/// Seconds that a row counts.
const STEP: f64 = 0.1;
/// Calls that the limit allows in a row: 1,000 in 10 s.
const LIMIT: f64 = 10.0;

/// The calls of one kind of client in 100 ms.
struct Row {
    kind: String,
    began: f64,
    calls: f64,
    admitted: f64,
}

fn main() -> Outcome {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [rows, picture] = arguments.as_slice() else { return Err("polite-picture ROWS PICTURE".into()) };
    let text = std::fs::read_to_string(rows)?;
    let lines = text.lines().filter_map(|line| line.strip_prefix(ALGORITHM));
    let rows = lines.map(Row::parse).collect::<Option<Vec<_>>>().ok_or("a row has five columns")?;
    draw(picture, &rows)
}

impl Row {
    /// The columns after that of the algorithm.
    fn parse(line: &str) -> Option<Self> {
        let mut columns = line.split('\t').skip(1);
        let kind = columns.next()?.to_owned();
        let mut number = || columns.next()?.parse().ok();
        Some(Self { kind, began: number()?, calls: number()?, admitted: number()? })
    }
}

fn draw(path: &Path, rows: &[Row]) -> Outcome {
    let paper = SVGBackend::new(path, SIZE).into_drawing_area();
    paper.fill(&PAPER)?;
    let (head, rest) = paper.split_vertically(44);
    write(&head, "200 clients share 1,000 calls in 10 s", (16, 24), 22.0)?;
    for (name, color, x) in [("admitted", ADMITTED, 470), ("refused", REFUSED, 570), ("limit", INK, 660)] {
        let height = if name == "limit" { 1 } else { 6 };
        head.draw(&Rectangle::new([(x, 24 - height), (x + 12, 24 + height)], color.filled()))?;
        write(&head, name, (x + 18, 24), 16.0)?;
    }
    let most = rows.iter().map(|row| row.calls).fold(1.0, f64::max);
    let kinds =
        [("naive", "a call every second, whatever is answered"), ("polite", "retry and pacer of examples/clients")];
    for (area, (kind, title)) in rest.split_evenly((kinds.len(), 1)).iter().zip(kinds) {
        let rows: Vec<_> = rows.iter().filter(|row| row.kind == kind).collect();
        draw_calls(area, title, &rows, most)?;
    }
    paper.present()?;
    Ok(())
}

/// Draws the calls of each 100 ms: a bar of the admitted ones, and on it one of the refused ones.
fn draw_calls(area: &Paper<'_>, title: &str, rows: &[&Row], most: f64) -> Outcome {
    let end = rows.last().map_or(0.0, |row| row.began) + STEP;
    let (head, chart) = area.split_vertically(24);
    write(&head, title, (76, 12), 16.0)?;
    let mut chart = ChartBuilder::on(&chart)
        .margin_left(12)
        .margin_right(16)
        .x_label_area_size(40)
        .y_label_area_size(52)
        .build_cartesian_2d(0.0..end, 0.0..most * 1.05)?;
    let whole = |number: &f64| format!("{number:.0}");
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(7)
        .y_labels(5)
        .x_label_formatter(&whole)
        .y_label_formatter(&whole)
        .x_desc("seconds")
        .y_desc("calls in 100 ms")
        .label_style(("sans-serif", 13.0, &INK))
        .axis_style(GRID)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .draw()?;
    let bar = |row: &Row, from, to, color: RGBColor| {
        Rectangle::new([(row.began, from), (row.began + STEP, to)], color.filled())
    };
    chart.draw_series(rows.iter().filter(|row| row.admitted > 0.0).map(|row| bar(row, 0.0, row.admitted, ADMITTED)))?;
    let refused = rows.iter().filter(|row| row.calls > row.admitted);
    chart.draw_series(refused.map(|row| bar(row, row.admitted, row.calls, REFUSED)))?;
    chart.draw_series([PathElement::new([(0.0, LIMIT), (end, LIMIT)], INK.stroke_width(1))])?;
    Ok(())
}

fn write(area: &Paper<'_>, words: &str, place: (i32, i32), size: f64) -> Outcome {
    let style = TextStyle::from(("sans-serif", size)).color(&INK).pos(Pos::new(HPos::Left, VPos::Center));
    area.draw(&Text::new(words.to_owned(), place, style))?;
    Ok(())
}
