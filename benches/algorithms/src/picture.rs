//! One picture per algorithm of the same traffic: what is offered and admitted, and how that adds up.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use tidegate::algorithm::{Algorithm, Limit};
use tidegate::model::{Micros, Quota, Unit, Window};

use crate::Outcome;
use crate::replay::{Counter, Recent, START};

const LIMIT: u32 = 100;
const MINUTES: u64 = 8;
const MINUTE: u64 = 60_000_000;
/// Bars per minute: each is 3 seconds.
const SLICES: u64 = 20;
/// Points of the sum per minute.
const POINTS: u64 = 100;
/// The traffic: from, to, in sixtieths of a minute, and how many hits, evenly spread.
const PHASES: [(u64, u64, u64); 4] = [(0, 120, 120), (168, 180, 100), (180, 192, 100), (282, 480, 792)];
/// What is written above it, and at which minute.
const WORDS: [(f64, &str); 3] =
    [(1.0, "60 per minute"), (3.0, "100 before and 100 after the border"), (6.35, "240 per minute")];

/// So wide that a bar has 5 pixels.
const SIZE: (u32, u32) = (892, 440);
const PAPER: RGBColor = RGBColor(0xf7, 0xf8, 0xfa);
const INK: RGBColor = RGBColor(0x33, 0x3a, 0x45);
const GRID: RGBColor = RGBColor(0xdd, 0xe1, 0xe7);
const OFFERED: RGBColor = RGBColor(0xbf, 0xc6, 0xd1);
const ADMITTED: RGBColor = RGBColor(0x2b, 0x6c, 0xc4);
const OVER: RGBColor = RGBColor(0xd4, 0x3f, 0x3a);

/// What becomes of the traffic.
struct Course {
    /// Of each slice: hits offered, and admitted.
    slices: Vec<(u32, u32)>,
    /// Hits admitted in the minute up to a moment, and the moment in minutes.
    sums: Vec<(f64, f64)>,
}

pub fn draw(path: &Path, algorithm: Algorithm) -> Outcome {
    // The meters give the same answers, so each is shown with a burst of its own.
    let burst = match algorithm {
        Algorithm::LeakyBucket => 50,
        Algorithm::Gcra => 10,
        _ => LIMIT,
    };
    let quota = Quota::new(LIMIT, Window::of_unit(Unit::Minute)).with_burst(burst);
    let course = Course::of(Limit::new(algorithm, quota)?);
    let with = if algorithm.has_burst() { format!(", burst {burst}") } else { String::new() };

    let paper = SVGBackend::new(path, SIZE).into_drawing_area();
    paper.fill(&PAPER)?;
    let (head, rest) = paper.split_vertically(44);
    write(&head, &format!("{}: {LIMIT} per minute{with}", algorithm.name()), (16, 24), 22.0, HPos::Left)?;
    for (x, color, word) in [(526, OFFERED, "refused"), (620, ADMITTED, "admitted"), (722, OVER, "more than the limit")]
    {
        head.draw(&Rectangle::new([(x, 18), (x + 12, 30)], color.filled()))?;
        write(&head, word, (x + 18, 24), 16.0, HPos::Left)?;
    }
    let (bars, sums) = rest.split_vertically(216);
    course.draw_bars(&bars)?;
    course.draw_sums(&sums)?;
    paper.present()?;
    Ok(())
}

impl Course {
    fn of(limit: Limit) -> Self {
        let mut counter = Counter::new(limit);
        let mut recent = Recent::new(Micros::new(MINUTE));
        let mut slices = vec![(0, 0); (MINUTES * SLICES) as usize];
        let mut sums = Vec::new();
        let hits = PHASES.iter().flat_map(|&(from, to, hits)| {
            (0..hits).map(move |hit| from * MINUTE / 60 + (to - from) * MINUTE / 60 * hit / hits)
        });
        let mut hits = hits.peekable();
        for point in 0..=MINUTES * POINTS {
            let until = point * MINUTE / POINTS;
            while let Some(offset) = hits.next_if(|offset| *offset <= until) {
                let now = START.saturating_add(Micros::new(offset));
                let (offered, admitted) = &mut slices[(offset * SLICES / MINUTE) as usize];
                *offered += 1;
                if counter.admits(now) {
                    *admitted += 1;
                    recent.push(now);
                }
            }
            let sum = recent.count(START.saturating_add(Micros::new(until)));
            sums.push((point as f64 / POINTS as f64, sum as f64));
        }
        Self { slices, sums }
    }

    fn draw_bars(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Outcome {
        let mut chart = ChartBuilder::on(area)
            .margin_left(12)
            .margin_right(16)
            .x_label_area_size(6)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..MINUTES as f64, 0.0..30.0)?;
        chart
            .configure_mesh()
            .disable_x_axis()
            .y_labels(4)
            .y_label_formatter(&|hits| format!("{hits:.0}"))
            .y_desc("hits in 3 seconds")
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(GRID)
            .label_style(("sans-serif", 15.0, &INK))
            .draw()?;
        let bar = |slice: usize, from: u32, to: u32, color: RGBColor| {
            let (left, right) = (slice as f64 / SLICES as f64, (slice + 1) as f64 / SLICES as f64);
            Rectangle::new([(left, f64::from(from)), (right - 0.01, f64::from(to))], color.filled())
        };
        for (slice, &(offered, admitted)) in self.slices.iter().enumerate() {
            if offered > admitted {
                chart.draw_series([bar(slice, admitted, offered, OFFERED)])?;
            }
            if admitted > 0 {
                chart.draw_series([bar(slice, 0, admitted, ADMITTED)])?;
            }
        }
        let style = TextStyle::from(("sans-serif", 16.0)).color(&INK).pos(Pos::new(HPos::Center, VPos::Center));
        chart.draw_series(WORDS.map(|(minute, words)| Text::new(words, (minute, 28.0), style.clone())))?;
        Ok(())
    }

    fn draw_sums(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Outcome {
        let limit = f64::from(LIMIT);
        let mut chart = ChartBuilder::on(area)
            .margin_left(12)
            .margin_right(16)
            .margin_top(8)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(0.0..MINUTES as f64, 0.0..210.0)?;
        chart
            .configure_mesh()
            .x_labels(MINUTES as usize + 1)
            .x_label_formatter(&|minute| format!("{minute:.0}"))
            .x_desc("minutes")
            .y_labels(5)
            .y_label_formatter(&|hits| format!("{hits:.0}"))
            .y_desc("in the last minute")
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(GRID)
            .label_style(("sans-serif", 15.0, &INK))
            .draw()?;
        let shape = |from: f64, color: RGBColor| {
            let edge = self.sums.iter().map(move |&(minute, sum)| (minute, sum.max(from)));
            let corners = [(0.0, from)].into_iter().chain(edge).chain([(MINUTES as f64, from)]);
            Polygon::new(corners.collect::<Vec<_>>(), color.filled())
        };
        // What is above the limit is drawn over it in red.
        chart.draw_series([shape(0.0, ADMITTED)])?;
        chart.draw_series([shape(limit, OVER)])?;
        let line = [(0.0, limit), (MINUTES as f64, limit)];
        chart.draw_series([PathElement::new(line, INK.stroke_width(2))])?;
        let style = TextStyle::from(("sans-serif", 16.0)).color(&INK).pos(Pos::new(HPos::Left, VPos::Bottom));
        chart.draw_series([Text::new("limit", (0.06, limit + 6.0), style)])?;
        Ok(())
    }
}

fn write(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    words: &str,
    place: (i32, i32),
    size: f64,
    anchor: HPos,
) -> Outcome {
    let style = TextStyle::from(("sans-serif", size)).color(&INK).pos(Pos::new(anchor, VPos::Center));
    area.draw(&Text::new(words.to_owned(), place, style))?;
    Ok(())
}
