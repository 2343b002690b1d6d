//! Draws the latencies of a load by percentile.

use std::path::Path;

use hdrhistogram::Histogram;
use plotters::prelude::*;

const SIZE: (u32, u32) = (892, 420);
const PAPER: RGBColor = RGBColor(0xf7, 0xf8, 0xfa);
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x45);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe7);
const LINE: RGBColor = RGBColor(0x2b, 0x6c, 0xc4);
const FONT: &str = "sans-serif";
/// Points of the curve for each halving of the calls that are slower.
const POINTS: u32 = 8;
/// Percentiles at the axis, by the number of nines.
const MOST_NINES: f64 = 6.0;
const PERCENTILES: [&str; 7] = ["0 %", "90 %", "99 %", "99.9 %", "99.99 %", "99.999 %", "99.9999 %"];

/// Draws latencies in nanoseconds into the SVG file at `path`.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn draw(path: &Path, latency: &Histogram<u64>, title: &str) -> anyhow::Result<()> {
    let millis = |nanos: u64| f64::from(u32::try_from(nanos / 1_000).unwrap_or(u32::MAX)) / 1_000.0;
    let mut points: Vec<(f64, f64)> = latency
        .iter_quantiles(POINTS)
        .filter(|step| step.quantile() < 1.0)
        .map(|step| (-(1.0 - step.quantile()).log10(), millis(step.value_iterated_to())))
        .filter(|(nines, _)| *nines <= MOST_NINES)
        .collect();
    if points.len() < 2 {
        // One call is as fast as all.
        let all = millis(latency.max());
        points = vec![(0.0, all), (1.0, all)];
    }
    let nines = points.last().map_or(1.0, |(nines, _)| nines.ceil().max(1.0));
    let least = millis(latency.min()).max(0.01);
    let most = millis(latency.max()).max(least * 2.0);

    let root = SVGBackend::new(path, SIZE).into_drawing_area();
    root.fill(&PAPER)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(title, (FONT, 15).into_font().color(&INK))
        .margin(16)
        .margin_right(40)
        .x_label_area_size(44)
        .y_label_area_size(64)
        .build_cartesian_2d(0.0..nines, (least..most * 1.2).log_scale())?;
    let percentile = |nines: &f64| {
        let place = PERCENTILES.iter().zip(0_u32..).find(|(_, place)| (f64::from(*place) - nines).abs() < 0.01);
        place.map_or_else(String::new, |(name, _)| (*name).to_owned())
    };
    chart
        .configure_mesh()
        .x_labels(8)
        .x_label_formatter(&percentile)
        .x_desc("share of the calls that are as fast, or faster")
        .y_label_formatter(&|millis| format!("{millis:.3}").trim_end_matches('0').trim_end_matches('.').to_owned())
        .y_desc("latency in ms")
        .label_style((FONT, 13).into_font().color(&INK))
        .axis_style(INK)
        .bold_line_style(GRID)
        .light_line_style(PAPER)
        .draw()?;
    chart.draw_series(std::iter::once(PathElement::new(points, LINE.stroke_width(2))))?;
    root.present()?;
    Ok(())
}
